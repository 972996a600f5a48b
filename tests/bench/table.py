# SPDX-License-Identifier: Apache-2.0
"""Rows of the table, and what a ratio of medians is worth."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass


@dataclass
class Row:
    """One line of the table. ratio is value / limit, or value itself where the limit is a time of its own."""

    what: str
    value: float
    unit: str
    limit: float | None
    limit_is: str
    ratio: float
    target: float | None  # None: there is none
    at_least: bool = False  # bandwidths: the ratio must reach the target, not stay below it
    low: float | None = None  # 95 % interval of the ratio
    high: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """no target; met; missed; undecided, where the 95 % interval has the target inside and the median is beyond it."""
        if self.target is None:
            return "no target"
        if self.at_least:
            return "met" if self.ratio >= self.target else "missed"
        if self.ratio <= self.target:
            return "met"
        return "missed" if self.low is None or self.low > self.target else "undecided"


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median; seeded."""
    rng = random.Random(1)
    n = len(ratios)
    medians = sorted(statistics.median(rng.choices(ratios, k=n)) for _ in range(4000))
    return medians[100], medians[3899]


def text(rows: list[Row]) -> str:
    """The table, its rows in the order given."""
    lines = [f"{'what':32} {'figure':>13} {'limit':>13}  {'ratio':>7} {'target':>8}  "]
    for r in rows:
        limit = "" if r.limit is None else f"{r.limit:.4g} {r.unit}"
        spread = "" if r.low is None else f" [{r.low:.3f}, {r.high:.3f}]"
        target = "" if r.target is None else f"{'>=' if r.at_least else '<='} {r.target:g}"
        verdict = r.verdict
        if verdict == "missed" and r.target:
            verdict = f"MISSED by {100 * abs(r.ratio / r.target - 1):.0f} %"
        facts = "; ".join(t for t in (verdict, r.limit_is and f"limit: {r.limit_is}", r.note) if t)
        figure = f"{r.value:.4g} {r.unit}"
        lines.append(
            f"{r.what:32} {figure:>13} {limit:>13}  {r.ratio:7.3f}{spread} {target}  {facts}"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def put_into(page: str, rows: list[Row]) -> str:
    """The page with this table in the place of its first block of code."""
    before, fence, rest = page.partition("```\n")
    _, end, after = rest.partition("```\n")
    if not end:
        raise ValueError("the page has no block of code")
    return before + fence + text(rows) + end + after
