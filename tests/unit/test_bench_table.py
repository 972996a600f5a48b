# SPDX-License-Identifier: Apache-2.0
"""What the bench table says of a row: nothing is called met that has no target, or that nobody can tell."""

from __future__ import annotations

import pytest

from tests.bench.table import Row, put_into, text


def row(
    ratio: float, target: float | None, low: float | None = None, at_least: bool = False
) -> Row:
    high = None if low is None else 2 * ratio - low
    return Row("w", ratio, "s", 1.0, "l", ratio, target, at_least, low, high)


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (row(0.5, None), "no target"),
        (row(1.0, 1.0), "met"),
        (row(1.1, 1.0), "missed"),
        (row(0.9, 1.0, low=0.8), "met"),
        (row(1.1, 1.0, low=0.95), "undecided"),
        (row(1.1, 1.0, low=1.05), "missed"),
        (row(0.9, 0.9, at_least=True), "met"),
        (row(0.8, 0.9, at_least=True), "missed"),
    ],
)
def test_verdict(one: Row, verdict: str) -> None:
    assert one.verdict == verdict
    assert verdict.lower() in text([one]).lower()


def test_the_table_replaces_the_page_s_first_block() -> None:
    page = put_into("before\n```\nold\n```\nafter\n```\nkept\n```\n", [row(1.1, 1.0)])
    assert "old" not in page
    assert page.startswith("before\n```\n")
    assert page.endswith("after\n```\nkept\n```\n")
    with pytest.raises(ValueError, match="no block"):
        put_into("nothing", [])
