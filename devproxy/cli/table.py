# SPDX-License-Identifier: Apache-2.0
"""Tables on stdout."""

from __future__ import annotations

import sys
from typing import TextIO


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    # A pipe has no width: a table cut at 80 columns would lose what a script looks for.
    write_table(sys.stdout, columns, rows, None if sys.stdout.isatty() else 200, title)


def write_table(
    to: TextIO, columns: list[str], rows: list[list[str]], width: int | None, title: str = ""
) -> None:
    # An import of 0.1 s: not for verbs that show no table.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=any(columns),
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console(file=to, width=width).print(table)
