#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gives each source file the line that names its licence (LICENSE). With --check, only says which have none.

scripts/spdx.py [--check] [FILE...]     default: every source file that git knows
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE = "SPDX-License-Identifier: Apache-2.0"
COMMENT = dict.fromkeys((".py", ".sh"), "#") | dict.fromkeys(
    (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".proto"), "//"
)
NAMES = {"CMakeLists.txt": "#", "Makefile": "#", "run": "#"}  # .ci/run is a shell script


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    return [
        ROOT / p
        for p in paths
        if (p.name in NAMES or p.suffix in COMMENT)
        and p.parts[:2] != ("tests", "data")
        and (ROOT / p).exists()
    ]


def main(argv: list[str]) -> int:
    given = [Path(word) for word in argv if word != "--check"]
    bare = []
    for path in given or sources():
        text = path.read_text(encoding="utf-8")
        if not text or re.search(rf"^\S+ {re.escape(LINE)}$", text[:600], re.M):
            continue
        bare.append(path)
        if "--check" in argv:
            print(f"{path}: no SPDX line")
            continue
        first, newline, rest = text.partition("\n")
        mark = f"{NAMES.get(path.name) or COMMENT[path.suffix]} {LINE}\n"
        path.write_text(
            f"{first}{newline}{mark}{rest}" if first.startswith("#!") else mark + text,
            encoding="utf-8",
        )
    return int(bool(bare) and "--check" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
