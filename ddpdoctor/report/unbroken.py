"""Text for terminals and pipes in which no word is broken: ids, paths and ``file:line`` are copied and searched for."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


def put(console: Console, what: RenderableType) -> None:
    """Print within the console's width, and let a word that does not fit stand out: it is neither broken nor cut."""
    if isinstance(what, Table):
        _widen(what)
    console.print(what, overflow="ignore", crop=False)


def _widen(table: Table) -> None:
    """Give each column room for its longest word, even where the table then stands out."""
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells) if isinstance(cell, (str, Text))]
        longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        column.min_width = max(column.min_width or 0, longest)
