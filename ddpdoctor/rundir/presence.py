"""The processes of a run on this host: its launcher, and the ranks that record, with their spools and status, read
from memory and not from storage."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .draining import spools_of
from .host_lock import copier_lock_is_held
from .layout import PROGRESS_FILE, parse_spool_name
from .liveness import is_over, is_running
from .spool import roots_of
from .stops import PROGRESS_SCHEMA, document_in
from .typed import PROGRESS


@dataclass(frozen=True)
class Present:
    """A rank with a spool: it runs, or its spool has not been removed yet."""

    rank: int
    pid: int
    """In its own pid namespace."""
    spool: str

    @property
    def progress(self) -> dict[str, Any] | None:
        """The status it wrote within the last second; None while its steps take less than one. Never raises."""
        return document_in(self.spool, PROGRESS_FILE, PROGRESS_SCHEMA, PROGRESS, [])


def present_ranks(run: str) -> list[Present]:
    """The ranks of this host, by rank; of several processes of one rank, as an elastic restart leaves them, the
    newest. Never raises."""
    found: dict[int, Present] = {}
    for spool, _ in sorted(spools_of(run), key=lambda each: _age(each[0])):
        named = parse_spool_name(spool)
        if named is not None:
            found[named[0]] = Present(*named, spool)
    return [found[rank] for rank in sorted(found)]


def living_ranks(run: str) -> list[Present]:
    """The present ranks that still record. Never raises."""
    return [rank for rank in present_ranks(run) if not is_over(rank.spool)]


def launcher_runs(run: str, manifest: Mapping[str, Any]) -> bool | None:
    """Whether the launcher runs that wrote the manifest of a run; None if that cannot be known. A process id of
    another pid namespace of this host means nothing; instead, the lock of the process that copies its ranks' records
    is checked, if it is visible here. Never raises."""
    runs = is_running(manifest)
    if runs is None and manifest.get("host") == socket.gethostname():
        roots = list(filter(os.path.exists, roots_of(run)))
        return any(map(copier_lock_is_held, roots)) if roots else None
    return runs


def _age(spool: str) -> float:
    try:
        return os.stat(spool).st_ctime
    except OSError:
        return 0.0
