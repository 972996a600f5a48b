# SPDX-License-Identifier: Apache-2.0
"""Starting, watching and asking the device-proxy servers of a job."""
