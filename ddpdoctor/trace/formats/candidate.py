"""A file that may be a trace."""

from __future__ import annotations

import os
import stat
from functools import cached_property

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.sources import is_url, open_place

HEAD_BYTES = 1 << 16
"""Bytes of a file that are looked at: within them a trace says what it is, after the description of many devices too."""


class Candidate:
    """A file by its path (or URL), and by its first bytes if they are asked for."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def head(self) -> bytes | None:
        """The first :data:`HEAD_BYTES` as they lie there; None where they cannot be read ahead, as from a pipe."""
        try:
            if not is_url(self.path) and not stat.S_ISREG(os.stat(self.path).st_mode):  # noqa: PTH116
                return None
            with open_place(self.path, ahead=False) as stream:
                return stream.read(HEAD_BYTES)
        except (OSError, UnusableInput):
            return None
