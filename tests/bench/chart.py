# SPDX-License-Identifier: Apache-2.0
"""docs/sharing.svg from docs/bench.json: what ranks on one GPU cost. `python -m tests.bench.chart`; `--docs` draws it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH, LEFT, BAR, GAP, TOP = 800, 250, 18, 14, 46
SCALE = 400  # pixels for a ratio of 1
COLOURS = {"spliced": "#2f6f4f", "splicing off": "#b9b9b9"}


def arms(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Model -> arm -> row."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        head, _, arm = row["what"].rpartition(", ")
        if head.startswith("DDP step of ") and arm in COLOURS:
            found.setdefault(head.removeprefix("DDP step of "), {})[arm] = row
    return found


def draw(rows: list[dict[str, Any]]) -> str:
    """The picture, as SVG."""
    found = arms(rows)
    height = TOP + len(found) * (2 * BAR + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="18" font-size="14">Time of a step of four ranks on one software GPU, '
        "over four steps of one rank alone</text>",
        '<text x="10" y="36" fill="#555">line: 95 % interval; 1.0: as much as the ranks would take one after another</text>',
    ]
    y = TOP
    for model, of in found.items():
        label = model.replace(", 4 ranks on one GPU", "")
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{escape(label)}</text>'
        )
        for arm, colour in COLOURS.items():
            row = of[arm]
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{row["ratio"] * SCALE:.1f}" height="{BAR - 3}" fill="{colour}"/>'
                f'<line x1="{LEFT + row["low"] * SCALE:.1f}" x2="{LEFT + row["high"] * SCALE:.1f}" y1="{y + BAR / 2 - 2}" '
                f'y2="{y + BAR / 2 - 2}" stroke="black"/>'
                f'<text x="{LEFT + row["high"] * SCALE + 6:.1f}" y="{y + BAR - 6}">{row["ratio"]:.2f} {arm}</text>'
            )
            y += BAR
        y += GAP
    x = LEFT + SCALE
    parts.append(
        f'<line x1="{x}" x2="{x}" y1="{TOP - 4}" y2="{y}" stroke="#a33" stroke-dasharray="4 3"/>'
    )
    parts.append(
        f'<text x="10" y="{y + 18}" fill="#555">Singularity, Figure 4: 1.02 to 1.03 for most models, '
        "1.18 to 2.63 where its operation squashing is off</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draws."""
    rows = json.loads((DOCS / "bench.json").read_text())["rows"]
    (DOCS / "sharing.svg").write_text(draw(rows))


if __name__ == "__main__":
    main()
