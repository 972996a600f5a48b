# SPDX-License-Identifier: Apache-2.0
"""A sample of the campaign `other-user` of scripts/soak.py."""

from __future__ import annotations

import os

import pytest

from tests.fault import other_user
from tests.integration.needs import missing


@pytest.mark.parametrize("seed", range(1, 5))
def test_another_user_gets_in_the_way(seed: int) -> None:
    if os.geteuid() != 0:
        missing("root", "the test becomes another user")
    figures = other_user.run(seed)
    assert sum(figures.values()) == other_user.ROUNDS, figures
