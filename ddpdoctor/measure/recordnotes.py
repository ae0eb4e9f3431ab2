"""What the records of a run's ranks lack, in words: for the notes, without which a part would pass for the whole."""

from __future__ import annotations

from collections.abc import Sequence

from .steplog import RankLog


def notes_on_records(logs: Sequence[RankLog]) -> list[str]:
    """Of all ranks of a run."""
    return [*_without_steps(logs), *(note for log in logs for note in _on_window(log))]


def _without_steps(logs: Sequence[RankLog]) -> list[str]:
    seen = sum(bool(log.steps) for log in logs)
    if not seen:
        return []
    known = [log.record.info.get("world_size") for log in logs]
    world = max((size for size in known if isinstance(size, int)), default=len(logs))
    return [
        f"Rank {log.rank}: {log.record.without_steps()}: the steps of {seen} of {max(world, len(logs))} ranks could be looked at."
        for log in logs
        if not log.steps
    ]


def _on_window(log: RankLog) -> list[str]:
    window = log.record.info.get("window") or {}
    state, why = window.get("state"), window.get("why")
    if state in ("skipped", "failed") and why:
        return [f"Rank {log.rank}: no profiler window: {why}"]
    return []
