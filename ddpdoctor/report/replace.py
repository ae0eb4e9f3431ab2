"""Output files are replaced as a whole: written beside, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8): a reader of ``path`` sees the old file or the new one, never a half.

    Raises DdpDoctorError where the file cannot be written.
    """
    target = Path(path)
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".new")
    except OSError as error:
        raise DdpDoctorError(f"cannot write {target}: {error.strerror or error}") from error
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        # mkstemp gives 0600; a report is meant to be passed on, so it gets what the umask would have given.
        umask = os.umask(0)
        os.umask(umask)
        fresh.chmod(0o666 & ~umask)
        fresh.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise DdpDoctorError(f"cannot write {target}: {error.strerror or error}") from error
