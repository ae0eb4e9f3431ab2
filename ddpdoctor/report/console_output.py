"""Console output that wraps at spaces only, so that ids, paths and ``file:line`` can be copied and searched for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpdoctor.plain import plain

MOST_TEXT_LENGTH, MOST_CELL_LENGTH = 20_000, 1000
"""Most characters printed of one text, and of a table's cell, which sets the width of its column."""
PADDING = 2
"""Space between two columns of a table."""
_WORD = re.compile(r"[^ \n]+")


def truncated(text: str, most: int = MOST_TEXT_LENGTH) -> str:
    """The first ``most`` characters of ``text``, with its length if it is longer."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def print_wrapped(console: Console, what: Text | Table) -> None:
    """Print within the console's width; a word that is longer is neither broken nor cut."""
    if isinstance(what, Table):
        _widen(what)
        console.print(what, crop=False)
        return
    for line in what.split("\n", allow_blank=True) or [what]:
        for part in line.divide(list(_breaks(line.plain, console.width))):
            part.rstrip()
            console.print(part, soft_wrap=True)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print ``text`` without reading it as markup, because names come from the user's program."""
    print_wrapped(console, Text(plain(truncated(text)), style=style))


def cell(text: str, style: str = "") -> Text:
    """``text`` as a cell of a table."""
    return Text(plain(truncated(text, MOST_CELL_LENGTH)), style=style)


def plain_table(width: int | None = None) -> Table:
    """A table without borders and columns."""
    return Table(box=None, pad_edge=False, padding=(0, PADDING, 0, 0), header_style="dim", width=width)


def _breaks(line: str, width: int) -> Iterator[int]:
    """Positions at which to break ``line``: each is the start of a word, never directly after the indentation."""
    begin, indented = 0, True
    for word in _WORD.finditer(line):
        if not indented and cell_len(line[begin : word.end()]) > width:
            begin = word.start()
            yield begin
        indented = indented and not word[0].strip()


def _widen(table: Table) -> None:
    """Make each column as wide as its longest word, even if the table then exceeds the console's width."""
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells) if isinstance(cell, (str, Text))]
        longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        column.min_width = max(column.min_width or 0, longest)
