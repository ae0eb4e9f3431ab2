"""Makes text from other sources (a name, a note, a line of a file) safe to print.

Escape sequences can move a terminal's cursor, set its title, fill the clipboard or create links, and bidirectional control
characters can make a name look like another one. All such text is passed through here before it is printed.
"""

from __future__ import annotations

MARK = "�"
_KEPT = "\u00a0"
"""No-break space, which Python's ``isprintable`` excludes: it keeps a number and its unit together."""


def plain(text: str) -> str:
    """``text`` on one line: line ends, which could fake a message of ddpdoctor, become spaces, and unprintable characters (control
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
