# SPDX-License-Identifier: Apache-2.0
"""Folders that somebody else changes while a test looks into them."""

from __future__ import annotations

import glob
import os
from pathlib import Path


def matching(folder: Path, pattern: str) -> list[Path]:
    """What matches pattern ("**" crosses folders) below folder at the moment; what goes meanwhile is passed over.

    pathlib's own glob, before Python 3.13, raises FileNotFoundError where a folder goes between its listing and the look
    into it, as the staging folder of a job does.
    """
    names = glob.glob(pattern, root_dir=folder, recursive=True, include_hidden=True)
    return [Path(os.path.join(folder, name)) for name in names]
