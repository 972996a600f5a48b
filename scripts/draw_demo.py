# SPDX-License-Identifier: Apache-2.0
"""Draws docs/demo.svg from a transcript: make demo 2>&1 | tee build/demo.txt; python scripts/draw_demo.py build/demo.txt

The picture is the transcript's text from `== 1.` on, as it is, but for: of the lines of training of one part only the first two
and the last two stay, and long lines are cut; both are marked by "...".
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "demo.svg"
WIDTH, LINE, CHAR, MARGIN = 108, 17, 7.3, 16
TRAINING = re.compile(r"^run \w+  step")
COLOURS = [(re.compile(r"^== "), "#7ee787"), (TRAINING, "#8b949e"), (re.compile(r"^ +yes "), "#7ee787"), (re.compile(r"^ +killed"), "#ff7b72")]  # fmt: skip


def shown(text: str) -> list[str]:
    lines = text[text.index("== 1.") :].splitlines()
    kept: list[str] = []
    part: list[str] = []
    for line in [*lines, ""]:
        if TRAINING.match(line):
            part.append(line)
            continue
        kept += part if len(part) <= 5 else [*part[:2], "...", *part[-2:]]
        part = []
        kept.append(line)
    return [line if len(line) <= WIDTH else line[: WIDTH - 4].rstrip() + " ..." for line in kept]


def colour(line: str) -> str:
    return next((word for pattern, word in COLOURS if pattern.match(line)), "#c9d1d9")


def draw(lines: list[str]) -> str:
    width, height = round(WIDTH * CHAR + 2 * MARGIN), LINE * len(lines) + 2 * MARGIN
    texts = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * n + 12}" fill="{colour(line)}">{escape(line)}</text>'
        for n, line in enumerate(lines)
        if line.strip()
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" xml:space="preserve">',
            "<title>What make demo prints</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *texts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    OUT.write_text(draw(shown(Path(sys.argv[1]).read_text())))
    print(f"{OUT}: {OUT.stat().st_size / 1024:.1f} KiB")
