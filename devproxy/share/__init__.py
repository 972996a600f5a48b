# SPDX-License-Identifier: Apache-2.0
"""Files for operators: systemd units and a Grafana dashboard, `devproxyd --print NAME`."""

from __future__ import annotations

import os
import shutil
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_FILES = {
    "user-unit": "devproxyd.service",
    "system-unit": "devproxyd@.service",
    "dashboard": "grafana.json",
}
NAMES = tuple(_FILES)
_PLACE = "@DEVPROXYD@"


def text(name: str) -> str:
    """One of NAMES; units name the devproxyd of this environment."""
    with open(os.path.join(_FOLDER, _FILES[name]), encoding="utf-8") as file:
        return file.read().replace(_PLACE, _program())


def _program() -> str:
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "devproxyd")
    return beside if os.path.exists(beside) else shutil.which("devproxyd") or beside
