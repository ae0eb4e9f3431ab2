"""The ranks of a run that record on this host now: their spools, and where each is, from memory and not from storage."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .draining import spools_of
from .layout import PROGRESS_FILE, parse_spool_name
from .stops import PROGRESS_SCHEMA, document_in
from .typed import PROGRESS


@dataclass(frozen=True)
class Present:
    """A rank whose spool is there: it runs, or nobody has tidied up after it yet."""

    rank: int
    pid: int
    """In its own pid namespace."""
    spool: str

    @property
    def progress(self) -> dict[str, Any] | None:
        """Where it is, as it wrote within the last second; None while its steps take less than one. Never raises."""
        return document_in(self.spool, PROGRESS_FILE, PROGRESS_SCHEMA, PROGRESS, [])


def present_ranks(run: str) -> list[Present]:
    """Those of this host, by rank; of several processes of one rank, as an elastic restart leaves them, the newest. Never raises."""
    found: dict[int, Present] = {}
    for spool, _ in sorted(spools_of(run), key=lambda each: _age(each[0])):
        named = parse_spool_name(spool)
        if named is not None:
            found[named[0]] = Present(*named, spool)
    return [found[rank] for rank in sorted(found)]


def _age(spool: str) -> float:
    try:
        return os.stat(spool).st_ctime
    except OSError:
        return 0.0
