# SPDX-License-Identifier: Apache-2.0
"""Each script of the list: to its end, and once more with an image, kill -9 of everything and a restore."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.lives import FOLDER, HERE, Script, every, life, plain, undisturbed

STAND_INS = [script for script in every() if script.of == "stand-in"]
PUBLIC = [script for script in every() if script.of != "stand-in"]


def check(script: Script) -> None:
    def comparable(lines: list[str]) -> list[str]:
        if script.unseeded:  # two runs differ; what one run says has the same form
            number = r"-?\d+(\.\d+)?(e[-+]?\d+)?|\b(nan|inf)\b"
            lines = [re.sub(number, "N", line) for line in lines]
        if script.unordered:  # lines of two processes may have become one
            lines = sorted("".join(lines).replace(" ", ""))
        return lines

    wanted = undisturbed(script)
    if script.plain:
        assert comparable(plain(script)) == comparable(wanted)
    if not script.brief:
        assert comparable(life(script, wanted)) == comparable(wanted)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("script", STAND_INS, ids=lambda s: s.name)
def test_stand_in(script: Script) -> None:
    check(script)


DRAWS = """
import os, random, sys
import helper
import numpy as np, torch
from torch.utils.data import DataLoader

class Draws(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return [random.random(), np.random.rand(), torch.rand(()).item()]

if __name__ == "__main__":
    print(sys.argv, random.random(), np.random.rand(), torch.rand(3).tolist())
    print(list(DataLoader(Draws(), num_workers=2, shuffle=True)))
"""


def test_a_seeded_script_draws_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    (tmp_path / "helper.py").write_text("")  # beside the script, as a script's own modules are

    def said(*words: str, cwd: Path = tmp_path, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, HERE / "seeded.py", *words],
            cwd=cwd,
            env=os.environ | env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    once = said("draws.py", "--a", "1")
    assert once.startswith("['draws.py', '--a', '1']")
    assert said("draws.py", "--a", "1") == once
    assert said("--pause-ms", "1", "draws.py", "--a", "1") == once
    elsewhere = said(str(tmp_path / "draws.py"), "--a", "1", cwd=Path("/"))
    assert elsewhere.partition("] ")[2] == once.partition("] ")[2]
    assert said("-m", "draws", "--a", "1").partition("] ")[2] == once.partition("] ")[2]
    assert said("draws.py", "--a", "1", RANK="1") != once


if FOLDER:  # make test-scripts: they are not ours to carry

    @pytest.mark.parametrize("script", PUBLIC, ids=lambda s: s.name)
    def test_public(script: Script) -> None:
        assert script.source.is_dir(), (
            f"{script.source} is not there: clone {script.of} into {FOLDER}"
        )
        check(script)
