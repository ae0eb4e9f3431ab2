"""Text from elsewhere (a name, a note, a line of a file) as a reader may be shown it.

A terminal obeys what it is sent: escape sequences move the cursor, set the title, fill the clipboard or make a link, and marks
for the direction of writing let a name read as another one. So every text passes here on its way out.
"""

from __future__ import annotations

MARK = "�"
_KEPT = "\u00a0"
"""Not printable for Python, and harmless: it keeps a number and its unit together."""


def plain(text: str) -> str:
    """``text`` on one line: each end of a line, which could fake a sentence of ours, becomes a space, and each character that
    is no letter, sign or space (controls, marks for the direction of writing, halves of surrogates) becomes a mark."""
    return plain_lines(text).replace("\n", " ")


def plain_lines(text: str) -> str:
    """The same with the ends of lines kept."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\t", " ")
    return "".join(
        letter if letter.isprintable() or letter == "\n" or letter in _KEPT else MARK for letter in text
    )
