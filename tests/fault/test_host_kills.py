# SPDX-License-Identifier: Apache-2.0
"""A sample of the campaign `host-kills` of scripts/soak.py."""

from __future__ import annotations

import pytest

from tests.fault import host_kills


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(1, 57))
def test_killed_on_one_of_two_hosts(seed: int) -> None:
    """Every victim in every verb."""
    host_kills.run(seed)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(1, 57))
def test_killed_on_one_of_two_hosts_on_cuda(seed: int) -> None:
    host_kills.run(seed, on_cuda=True)
