# SPDX-License-Identifier: Apache-2.0
"""Each script of the list: to its end, and once more with an image, kill -9 of everything and a restore."""

from __future__ import annotations

import re

import pytest

from tests.scripts.lives import FOLDER, Script, every, life, undisturbed

STAND_INS = [script for script in every() if script.of == "stand-in"]
PUBLIC = [script for script in every() if script.of != "stand-in"]


def check(script: Script) -> None:
    wanted = undisturbed(script)
    if script.brief:
        return
    found = life(script, wanted)
    if script.unseeded:  # two runs differ; what one run says has the same form

        def form(lines: list[str]) -> list[str]:
            return [re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?|\b(nan|inf)\b", "N", line) for line in lines]

        wanted, found = form(wanted), form(found)
    if script.unordered:  # lines of two processes may have become one
        wanted, found = [sorted("".join(lines).replace(" ", "")) for lines in (wanted, found)]
    assert found == wanted


@pytest.mark.sweep(1)
@pytest.mark.parametrize("script", STAND_INS, ids=lambda s: s.name)
def test_stand_in(script: Script) -> None:
    check(script)


if FOLDER:  # make test-scripts: they are not ours to carry

    @pytest.mark.parametrize("script", PUBLIC, ids=lambda s: s.name)
    def test_public(script: Script) -> None:
        assert script.source.is_dir(), (
            f"{script.source} is not there: clone {script.of} into {FOLDER}"
        )
        check(script)
