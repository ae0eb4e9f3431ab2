"""Files that several processes may write and read at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` fill a file beside ``path``, which then takes its place as a whole; folders are made. Raises OSError and
    what ``write`` raises; ``path`` then is as before."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
