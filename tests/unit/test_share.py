# SPDX-License-Identifier: Apache-2.0
"""Units for systemd and the dashboard for Grafana: each is what its reader takes."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from devproxy import share
from devproxy.control import metrics
from devproxy.control.daemon import main

NAMES = {"user-unit": "devproxyd.service", "system-unit": "devproxyd@.service"}


@pytest.mark.parametrize("name", NAMES)
def test_units(name: str, tmp_path: Path) -> None:
    text = share.text(name)
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    program, *options = unit["Service"]["ExecStart"].split()
    assert Path(program).is_absolute()
    assert Path(program).name == "devproxyd"
    assert "--foreground" in options
    assert "--stay" in options
    # Jobs that it restored are its children.
    assert unit["Service"]["KillMode"] == "process"
    if shutil.which("systemd-analyze"):
        path = tmp_path / NAMES[name]
        if "@" in path.name:
            path = tmp_path / "devproxyd@root.service"
        path.write_text(text.replace(program, "/bin/true"))
        flag = "--user" if name == "user-unit" else "--system"
        result = subprocess.run(
            ["systemd-analyze", "verify", flag, path],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        )
        ours = [line for line in result.stderr.splitlines() if "devproxyd" in line]
        assert not ours, result.stderr


def test_the_options_of_the_units_are_the_daemons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["devproxyd", "--help"])
    with pytest.raises(SystemExit):
        main()
    known = capsys.readouterr().out
    for name in NAMES:
        for option in re.findall(r" (--[a-z-]+)", share.text(name).split("ExecStart=")[1].split("\n")[0]):  # fmt: skip
            assert option in known


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads(share.text("dashboard"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 10
    for expression in asked:
        names = re.findall(r"devproxy_\w+", expression)
        assert names, expression
        assert set(names) <= metrics.names(), expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
