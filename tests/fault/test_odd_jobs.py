# SPDX-License-Identifier: Apache-2.0
"""A sample of the campaign `odd-jobs` of scripts/soak.py."""

from __future__ import annotations

import pytest

from tests.fault import odd_jobs


@pytest.mark.parametrize("seed", [1, 22, 57])
def test_job_of_random_traits(seed: int) -> None:
    """Two of files, threads, memory and sessions; an obstacle that is refused by name and goes away."""
    figures = odd_jobs.run(seed)
    assert figures["restored"] >= 1, figures


def test_what_criu_alone_does_not_keep() -> None:
    """A periodic timer that has expired, and terminals where the host has them too."""
    assert odd_jobs.run(3, ["timerfd_late", "terminal", "named_deleted"])["restored"] == 1


def test_a_trait_that_no_restore_keeps_is_noticed() -> None:
    with pytest.raises(AssertionError, match="FAILED forgetful: Wrong: PID namespace"):
        odd_jobs.run(3, ["forgetful"])
