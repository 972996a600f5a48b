# SPDX-License-Identifier: Apache-2.0
"""A sample of the campaign `clock-jumps` of scripts/soak.py."""

from __future__ import annotations

import pytest

from tests.fault import clock_jumps


@pytest.mark.parametrize("seed", [4, 1, 2, 3])
def test_a_clock_that_jumps(seed: int) -> None:
    """By minutes, by hours, by days, by years."""
    figures = clock_jumps.run(seed)
    assert figures["jumps"] > 20, figures
