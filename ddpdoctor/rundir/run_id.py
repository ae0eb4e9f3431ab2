"""The run that a run directory, and a spool, belongs to.

A path does not identify it: after a run was deleted, another one can have the same path while records of the first, or
its ranks themselves, still exist.
"""

from __future__ import annotations

import os
import re
from typing import Any

from .files import read_json
from .layout import MANIFEST_FILE

RUN_ID = "run_id"
"""Name of the field in the manifest and in each launcher's record."""
_IN_ROOT = re.compile(r"^ddpdoctor-\d+-\d+-([0-9a-f]{16})(?:-\w{8})?$")

_known: dict[str, tuple[tuple[int, ...], str | None]] = {}
"""By path of a manifest: the file that was read, and the id in it."""


class OtherRunError(OSError):
    """The run directory is that of another run by now."""


def new_run_id() -> str:
    """A random id for a new run."""
    return os.urandom(8).hex()


def run_id(run: str) -> str | None:
    """The id in a run directory's manifest, or, where that cannot be read, in a launcher's record."""
    manifest = read_json(os.path.join(run, MANIFEST_FILE), [])
    if manifest is not None:
        return _valid(manifest)
    for folder, _, names in os.walk(os.path.join(run, "hosts")):
        for name in sorted(names):
            if name.startswith("launch-") and name.endswith(".json"):
                found = _valid(read_json(os.path.join(folder, name), []) or {})
                if found is not None:
                    return found
    return None


def _valid(document: dict[str, Any]) -> str | None:
    found = document.get(RUN_ID)
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{16}", found) else None


def id_of_root(root: str) -> str | None:
    """The id of the run whose spools lie in ``root``; None where it was made for a run without one."""
    found = _IN_ROOT.match(os.path.basename(root))
    return found.group(1) if found else None


def refuse_other_run(run: str, known_id: str | None) -> None:
    """Raises OtherRunError where the run directory is known to be of another run than ``known_id``: its manifest says so,
    or says nothing.

    Cheap enough for each copy: the manifest is only read again when it has changed. A directory without one is where ranks
    recorded on a host that has no launcher.
    """
    if known_id is None:
        return
    path = os.path.join(run, MANIFEST_FILE)
    try:
        status = os.stat(path)
    except OSError:
        return
    version = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    known = _known.get(path)
    if known is None or known[0] != version:
        known = _known[path] = version, run_id(run)
    if known[1] != known_id:
        raise OtherRunError(f"{run} holds another run by now")
