"""What the records of a run's ranks lack, in words: for the notes, without which a part would pass for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdoctor.rundir import Note

from .log import RankLog

_FAR_FEWER = 0.9
"""Share of the others' steps: ranks that are killed one after the other differ by a few."""


def notes_on_records(logs: Sequence[RankLog], ended: bool, window: int | None = None) -> list[Note]:
    """Of all ranks of a run; ``ended``: its job is known to be over. ``window``: the captured one that is looked at."""
    own = [Note(sentence).of_rank(log.rank) for log in logs for sentence in _own_sentences(log)]
    return [
        *_without_steps(logs),
        *_shorter(logs),
        *own,
        *(_cut_off(log, ended) for log in logs if _lost_its_window(log)),
        *([] if window is not None else _captured(logs)),
    ]


def _captured(logs: Sequence[RankLog]) -> list[Note]:
    """Windows that were opened while the job ran, where there is none from its start."""
    if not logs or any(log.record.trace is not None for log in logs):
        return []
    saved = sorted({number for log in logs for number in _saved(log)})
    if not saved:
        return []
    which = f"Window {saved[0]} was" if len(saved) == 1 else f"Windows {', '.join(map(str, saved))} were"
    return [Note(f"{which} captured while the job ran, and not looked at here: `--window {saved[-1]}` does.")]


def _saved(log: RankLog) -> list[int]:
    captures = log.record.info.get("captures") or []
    return [each.get("number", 0) for each in captures if each.get("state") == "saved"]


def _without_steps(logs: Sequence[RankLog]) -> list[Note]:
    seen = sum(bool(log.steps) for log in logs)
    if not seen:
        return []
    known = [log.record.info.get("world_size") for log in logs]
    world = max((size for size in known if isinstance(size, int)), default=len(logs))
    looked_at = f"the steps of {seen} of {max(world, len(logs))} ranks could be looked at"
    return [
        Note(f"{log.record.without_steps()}: {looked_at}.").of_rank(log.rank) for log in logs if not log.steps
    ]


def _shorter(logs: Sequence[RankLog]) -> list[Note]:
    """Of ranks that recorded far fewer steps than others: only what all recorded is compared."""
    most = max((len(log.steps) for log in logs), default=0)
    return [
        Note(
            f"Rank {log.rank} recorded {len(log.steps)} steps while others recorded {most}: "
            "only steps that all recorded are measured.",
            ranks=(log.rank,),
        )
        for log in logs
        if 0 < len(log.steps) < _FAR_FEWER * most
    ]


def _own_sentences(log: RankLog) -> list[str]:
    """What the rank itself has to tell."""
    info = log.record.info
    lost = None if _saved(log) else _why_no_window(info.get("window") or {})
    errors = (info.get("hook") or {}).get("errors") or []
    return [
        *(info.get("notes") or []),
        # The error that cost the window stands in both places, and is said once.
        *(error for error in errors if error != lost),
        *([f"no profiler window: {lost}"] if lost else []),
    ]


def _lost_its_window(log: RankLog) -> bool:
    state = (log.record.info.get("window") or {}).get("state")
    return state in ("open", "saving") and log.record.trace is None


def _cut_off(log: RankLog, ended: bool) -> Note:
    window = log.record.info["window"]
    doing = "was open" if window["state"] == "open" else "was being saved"
    if ended:
        return Note(
            f"Rank {log.rank} was killed while its profiler window {doing}: what the window had seen is lost.",
            ranks=(log.rank,),
        )
    sentence = f"its profiler window {doing} when this was read: what it sees is not in this diagnosis."
    return Note(sentence).of_rank(log.rank)


def _why_no_window(window: dict[str, Any]) -> str | None:
    """Why this rank has no profiler window; None where it has one, or has not said."""
    return window.get("why") if window.get("state") in ("skipped", "failed") else None
