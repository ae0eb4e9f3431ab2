"""What the records of a run's ranks lack, in words: for the notes, without which a part would pass for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .log import RankLog

_FAR_FEWER = 0.9
"""Share of the others' steps: ranks that are killed one after the other differ by a few."""


def notes_on_records(logs: Sequence[RankLog], ended: bool) -> list[str]:
    """Of all ranks of a run; ``ended``: its job is known to be over."""
    own = [f"Rank {log.rank}: {note}" for log in logs for note in _of(log)]
    return [
        *_without_steps(logs),
        *_shorter(logs),
        *own,
        *(_cut_off(log, ended) for log in logs if _lost_its_window(log)),
    ]


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


def _shorter(logs: Sequence[RankLog]) -> list[str]:
    """Of ranks that recorded far fewer steps than others: only what all recorded is compared."""
    most = max((len(log.steps) for log in logs), default=0)
    return [
        f"Rank {log.rank} recorded {len(log.steps)} steps where others recorded {most}: only steps that all recorded are measured."
        for log in logs
        if 0 < len(log.steps) < _FAR_FEWER * most
    ]


def _of(log: RankLog) -> list[str]:
    info = log.record.info
    window = _on_window(info.get("window") or {})
    errors = (info.get("hook") or {}).get("errors") or []
    # What cost the window is said once.
    return [
        *(info.get("notes") or []),
        *(e for e in errors if not any(e in note for note in window)),
        *window,
    ]


def _lost_its_window(log: RankLog) -> bool:
    state = (log.record.info.get("window") or {}).get("state")
    return state in ("open", "saving") and log.record.trace is None


def _cut_off(log: RankLog, ended: bool) -> str:
    window = log.record.info["window"]
    doing = "was open" if window["state"] == "open" else "was being saved"
    if ended:
        return (
            f"Rank {log.rank} was killed while its profiler window {doing}: what the window had seen is lost."
        )
    return f"Rank {log.rank}: its profiler window {doing} when this was read: what it sees is not in this diagnosis."


def _on_window(window: dict[str, Any]) -> list[str]:
    state, why = window.get("state"), window.get("why")
    if state in ("skipped", "failed") and why:
        return [f"no profiler window: {why}"]
    return []
