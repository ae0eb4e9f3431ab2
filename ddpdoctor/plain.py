"""Makes text from other sources (a name, a note, a line of a file) safe to print.

Escape sequences can move a terminal's cursor, set its title, fill the clipboard or create links. Bidirectional control characters
can make a name look like another one. All text that may contain them must be passed through this module before it is printed.
"""

from __future__ import annotations

MARK = "�"
_KEPT = "\u00a0"
"""No-break space, used between a number and its unit. It is kept although ``str.isprintable`` excludes it."""


def plain(text: str) -> str:
    """``text`` on one line. Line ends become spaces, because they could fake a message of ddpdoctor. Unprintable characters (control
    characters, bidirectional controls, surrogates) become :data:`MARK`."""
    return plain_lines(text).replace("\n", " ")


def plain_lines(text: str) -> str:
    """Like :func:`plain`, but keeps line ends."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\t", " ")
    return "".join(
        letter if letter.isprintable() or letter == "\n" or letter in _KEPT else MARK for letter in text
    )
