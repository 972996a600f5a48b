# SPDX-License-Identifier: Apache-2.0
"""Each source file names its licence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_each_source_file_names_the_licence() -> None:
    line = [sys.executable, str(ROOT / "scripts/spdx.py"), "--check"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_licence_check_finds_a_file_without_a_line(tmp_path: Path) -> None:
    bare, good = tmp_path / "bare.py", tmp_path / "good.sh"
    bare.write_text("#!/usr/bin/env python3\npass\n")
    good.write_text("#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n")
    line = [sys.executable, str(ROOT / "scripts/spdx.py")]
    done = subprocess.run([*line, "--check", bare, good], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, f"{bare}: no SPDX line\n")
    subprocess.run([*line, bare, good], check=True, capture_output=True)
    lines = bare.read_text().splitlines()
    assert lines == ["#!/usr/bin/env python3", "# SPDX-License-Identifier: Apache-2.0", "pass"]
    assert good.read_text().count("SPDX") == 1
