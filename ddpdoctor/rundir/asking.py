"""What the launcher's side asks a rank: where it stands. By a file in its spool, which the rank's attendant looks for."""

from __future__ import annotations

import os

from .handover import QUESTION_FILE
from .owned import open_file, private_folder, replace_file

_MOST_DIGITS = 9


def ask(spool: str, number: int) -> None:
    """Ask the rank of this spool; a later question has a larger ``number``. Raises OSError."""
    with (
        private_folder(os.path.dirname(spool)) as root,
        private_folder(os.path.basename(spool), root) as here,
    ):
        replace_file(QUESTION_FILE, here, str(number).encode())


def question_in(spool: str) -> int:
    """The number of the last question to the rank of this spool; 0 where there is none. Never raises."""
    try:
        handle = open_file(os.path.join(spool, QUESTION_FILE), None, os.O_RDONLY)
    except OSError:
        return 0
    with open(handle, "rb") as source:
        text = source.read(_MOST_DIGITS)
    return int(text) if text.isdigit() else 0
