"""Text for terminals and pipes in which no word is broken: ids, paths and ``file:line`` are copied and searched for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

MOST_OF_A_TEXT, MOST_OF_A_CELL = 20_000, 1000
"""Letters that a terminal is sent of one text, and of a cell, as whose whole column is wide: more than any path or id of a job has."""
_WORD = re.compile(r"[^ \n]+")


def truncated(text: str, most: int = MOST_OF_A_TEXT) -> str:
    """``text``, of very long ones the beginning: a terminal is no place to read them."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} letters)"


def print_wrapped(console: Console, what: Text | Table) -> None:
    """Print within the console's width, and let a word that does not fit stand out: it is neither broken nor cut."""
    if isinstance(what, Table):
        _widen(what)
        console.print(what, crop=False)
        return
    for line in what.split("\n", allow_blank=True) or [what]:
        for part in line.divide(list(_breaks(line.plain, console.width))):
            part.rstrip()
            console.print(part, soft_wrap=True)


def _breaks(line: str, width: int) -> Iterator[int]:
    """Where lines begin, but for the first: always a word's begin, and none behind a mere indentation."""
    begin, indented = 0, True
    for word in _WORD.finditer(line):
        if not indented and cell_len(line[begin : word.end()]) > width:
            begin = word.start()
            yield begin
        indented = indented and not word[0].strip()


def _widen(table: Table) -> None:
    """Give each column room for its longest word, even where the table then stands out."""
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells) if isinstance(cell, (str, Text))]
        longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        column.min_width = max(column.min_width or 0, longest)
