# SPDX-License-Identifier: Apache-2.0
"""The set-up says what it does while it does it (scripts/step.py), and the demo shows output as it comes."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("step")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "QUIET_S", 0.2)
    monkeypatch.setattr(module, "EVERY_S", 0.6)
    return module


def test_a_long_step_is_never_silent(step: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["sh", "-c", "echo fetching x; echo WARNING: Location is ignored; sleep 1.5"]
    assert step.main("a step", command) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("a step ...")
    assert any(re.search(r"a step, \d+ s: fetching x$", line) for line in lines[1:-1])
    assert re.search(r"a step: done in \d+ s \(\d+ s of CPU\)$", lines[-1])


def test_a_step_that_ends_at_once_says_nothing(
    step: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    assert step.main("a step", ["echo", "up to date"]) == 0
    assert capfd.readouterr() == ("", "")


def test_a_step_that_fails_shows_why(
    step: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert step.main("a step", ["sh", "-c", "echo no disk; exit 7"]) == 7
    said = capfd.readouterr()
    assert said.err == "no disk\n"
    assert f"failed with 7; all of its output: {tmp_path}/build/steps/a-step.log" in said.out


def test_the_demo_follows_a_file_that_a_restore_makes_shorter(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo"])
    demo = load("demo")
    log = tmp_path / "train.log"
    log.write_text("step 1\nstep 2\nstep 3\n")
    with demo.Shown(log, log.stat().st_size):
        log.write_text("step 1\n")
        time.sleep(0.4)
        with log.open("a") as file:
            file.write("step 2 again\n")
    assert capfd.readouterr().out == "step 2 again\n"
