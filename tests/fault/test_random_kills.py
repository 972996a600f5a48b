# SPDX-License-Identifier: Apache-2.0
"""A sample of the campaign `random-kills` of scripts/soak.py."""

from __future__ import annotations

import pytest

from tests.fault import random_kills


@pytest.mark.parametrize("seed", [1, 2, 5, 6])
def test_killed_at_a_random_moment(seed: int) -> None:
    """server and criu in the middle of an image; devproxy-run and everything at any moment."""
    figures = random_kills.run(seed, late_s=60)  # the campaign measures it, on a machine of its own
    assert figures["kills"] == 1, figures
