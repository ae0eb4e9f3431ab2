"""What the ranks of a job say alike is kept once: with hundreds of them it is as much as their events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from .table import RankTrace, TraceMeta


class Shared:
    """Names of events, and descriptions of process groups and devices, that some rank had before.

    Each rank lists all members of each process group, so these descriptions grow with the square of the ranks.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._descriptions: dict[bytes, tuple[dict[str, Any], ...]] = {}

    def of(self, trace: RankTrace) -> RankTrace:
        """``trace``, with what others had before replaced by theirs. Its list of names is changed in place."""
        known = self._names
        trace.names[:] = [known.setdefault(name, name) for name in trace.names]
        return replace(trace, meta=self._meta(trace.meta))

    def _meta(self, meta: TraceMeta) -> TraceMeta:
        groups, devices = self._once(meta.process_groups), self._once(meta.devices)
        return replace(meta, process_groups=groups, devices=devices)

    def _once(self, described: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if not described:
            return described
        return self._descriptions.setdefault(msgspec.json.encode(described), described)
