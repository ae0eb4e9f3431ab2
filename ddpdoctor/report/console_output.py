"""Console output that wraps at spaces only, so that ids, paths and ``file:line`` can be copied and searched for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpdoctor.plain import plain

MAX_TEXT_LENGTH, MAX_CELL_LENGTH = 20_000, 1000
"""Maximum number of characters printed of a text and of a table cell."""
PADDING = 2
"""Characters between two columns of a table."""
_WORD = re.compile(r"[^ \n]+")


def truncated(text: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """``text``, or if it is longer than ``max_length`` characters, its beginning and its length."""
    return text if len(text) <= max_length else f"{text[:max_length]} … ({len(text):,} characters)"


def print_wrapped(console: Console, content: Text | Table) -> None:
    """Print wrapped to the console's width. Words longer than that are neither broken nor truncated."""
    if isinstance(content, Table):
        _widen(content)
        console.print(content, crop=False)
        return
    for line in content.split("\n", allow_blank=True) or [content]:
        for part in line.divide(list(_breaks(line.plain, console.width))):
            part.rstrip()
            console.print(part, soft_wrap=True)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print ``text`` without interpreting markup, because it may contain names from the user's program."""
    print_wrapped(console, Text(plain(truncated(text)), style=style))


def cell(text: str, style: str = "") -> Text:
    """A table cell with ``text``."""
    return Text(plain(truncated(text, MAX_CELL_LENGTH)), style=style)


def plain_table(width: int | None = None) -> Table:
    """An empty table without borders."""
    return Table(box=None, pad_edge=False, padding=(0, PADDING, 0, 0), header_style="dim", width=width)


def _breaks(line: str, width: int) -> Iterator[int]:
    """Positions at which to break ``line``: starts of words, except of the first word."""
    begin, indented = 0, True
    for word in _WORD.finditer(line):
        if not indented and cell_len(line[begin : word.end()]) > width:
            begin = word.start()
            yield begin
        indented = indented and not word[0].strip()


def _widen(table: Table) -> None:
    """Make each column at least as wide as its longest word, even if the table then exceeds the console's width."""
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells) if isinstance(cell, (str, Text))]
        longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        column.min_width = max(column.min_width or 0, longest)
