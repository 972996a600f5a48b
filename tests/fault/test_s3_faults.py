# SPDX-License-Identifier: Apache-2.0
"""A sample of the campaign `s3-faults` of scripts/soak.py."""

from __future__ import annotations

from tests.fault import s3_faults


def test_a_store_on_a_bad_network() -> None:
    figures = s3_faults.run(3)
    assert figures["requests"] > 100, figures
