# SPDX-License-Identifier: Apache-2.0
"""What devproxy runs on."""
