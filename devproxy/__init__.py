# SPDX-License-Identifier: Apache-2.0
"""devproxy: unmodified training jobs behind a device proxy."""

__version__ = "0.1.0"
