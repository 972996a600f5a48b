# SPDX-License-Identifier: Apache-2.0
"""docs/environment.md lists each DEVPROXY_* variable that the product reads or sets, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
QUOTED = re.compile(r"""["'](DEVPROXY_[A-Z0-9_]+)["'=]""")
IN_SHELL = re.compile(r"\$\{?(DEVPROXY_[A-Z0-9_]+)")


def of_the_sources() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "devproxy").rglob("*"):
        if path.suffix in (".py", ".c", ".cc", ".h") and "_pb" not in path.parts:
            found |= set(QUOTED.findall(path.read_text(encoding="utf-8")))
    for path in (ROOT / "scripts").glob("*.sh"):
        found |= set(IN_SHELL.findall(path.read_text()))
    return found | set(QUOTED.findall((ROOT / "setup.py").read_text()))


def test_the_table_of_environment_variables_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/environment.md").read_text(), re.M)
    assert len(rows) == len(set(rows))
    assert set(rows) == of_the_sources()
    assert len(rows) > 30  # else the patterns find nothing any more
