# SPDX-License-Identifier: Apache-2.0
"""The two commands: devproxy-run and devproxy."""
