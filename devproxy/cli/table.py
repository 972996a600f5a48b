"""Tables on stdout."""

from __future__ import annotations

import sys


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
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
    # A pipe has no width: a table cut at 80 columns would lose what a script looks for.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
