# SPDX-License-Identifier: Apache-2.0
"""Checkpoint and restore: the host state, the device state, the files of a job, and the store of images."""
