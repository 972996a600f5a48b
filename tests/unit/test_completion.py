# SPDX-License-Identifier: Apache-2.0
"""Completion as a shell does it: bash runs the script that the parser gives."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from devproxy import records
from devproxy.cli import completion, ctl, run

ASK = """
eval "$SCRIPT"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_devproxy
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where `devproxy` is this checkout's, and two jobs are remembered."""
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DEVPROXY_SHM_DIR", str(tmp_path))
    for job in ("train-a", "train-b"):
        records.begin(job, "id", ["true"], 5.0)
    program = tmp_path / "devproxy"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m devproxy.cli.ctl "$@"\n')
    program.chmod(0o755)
    root = Path(__file__).resolve().parents[2]
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(root),
        "DEVPROXY_STATE_DIR": str(tmp_path / "state"),
        "DEVPROXY_SHM_DIR": str(tmp_path),
    }


def completed(env: dict[str, str], *words: str, program: str = "devproxy") -> list[str]:
    env = env | {"SCRIPT": completion.script("bash", *ctl.parser(), run.USAGE)}
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", program, *words], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_what_bash_completes(shell: dict[str, str]) -> None:
    assert completed(shell, "mig") == ["migrate"]
    assert {"kill", "top", "images", "run", "help"} <= set(completed(shell, ""))
    assert completed(shell, "kill", "train-") == ["train-a", "train-b"]
    assert completed(shell, "--json", "restore", "train-b") == ["train-b"]
    assert completed(shell, "migrate", "train-a", "--t") == ["--to"]
    assert completed(shell, "checkpoint", "train-a", "--progress", "") == list(progress_modes())
    assert completed(shell, "images", "g") == ["gc"]
    assert completed(shell, "help", "sus") == ["suspend"]
    assert completed(shell, "ps", "x") == []
    for words, program in ((["run"], "devproxy"), ([], "/usr/bin/devproxy-run")):
        of_run = partial(completed, shell, *words, program=program)
        assert of_run("--checkpoint") == ["--checkpoint-every"]
        assert of_run("--device", "so") == ["soft"]
        assert of_run("--gpus", "2", "--barrier", "") == ["auto", "meta", "agree", "takeback"]
        assert of_run("--gpus", "2", "--", "python", "--ch") == []


def progress_modes() -> tuple[str, ...]:
    from devproxy.cli.progress import MODES

    return MODES


def test_every_verb_and_option_is_there() -> None:
    top, verbs = ctl.parser()
    text = completion.script("bash", top, verbs, run.USAGE)
    for verb, parser in verbs.items():
        assert f"    {verb}) options=" in text
        for action in parser._actions:
            assert all(name in text for name in action.option_strings if name.startswith("--"))


def test_zsh_takes_the_same_script() -> None:
    bash, zsh = (completion.script(shell, *ctl.parser(), run.USAGE) for shell in completion.SHELLS)
    assert zsh == "autoload -Uz bashcompinit && bashcompinit\n" + bash
