# SPDX-License-Identifier: Apache-2.0
"""What a daemon that serves is made of (control/daemon.py begins and ends it)."""
