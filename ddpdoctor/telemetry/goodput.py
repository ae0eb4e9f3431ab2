"""Where the wall time of a running job went so far. ``measure/wholerun`` divides that of a recorded run, in more detail."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .live import LiveRank, LiveRun

PARTS = ("start", "earlier_attempts", "preparation", "steps", "other", "end")
"""The parts in order. ``preparation``: from the process group to the end of step 0, but for a usual step. ``steps``: all steps, if
each took the usual time. ``other``: the rest, which longer steps took, such as pauses, evaluations and checkpoints, and the present
step. The others are those of a recorded run."""


@dataclass(frozen=True)
class RunSoFar:
    """The wall time since the start of the launcher."""

    wall_s: float
    parts_s: dict[str, float]
    """Seconds by part, without empty ones: the mean over the ranks."""

    @property
    def goodput(self) -> float:
        """Share of the wall time that the steps so far would take if each took the usual time."""
        return min(self.parts_s.get("steps", 0.0) / self.wall_s, 1.0)


def run_so_far(run: LiveRun, host: str | None = None) -> RunSoFar | None:
    """The wall time of ``run`` until now, or until its end; by the ranks of ``host``, if one is given. None without a start or ranks."""
    started_ns = run.manifest.get("started_ns")
    ranks = [live for live in run.ranks.values() if host in (None, live.host)]
    if started_ns is None or not ranks:
        return None
    last_ns = max((live.steps[-1].end_ns for live in ranks if live.steps), default=started_ns)
    until_ns = run.manifest.get("ended_ns") or (last_ns if run.gone else time.time_ns())
    wall_s = (until_ns - started_ns) / 1e9
    if wall_s <= 0:
        return None
    each = [_parts(live, started_ns, until_ns, is_over=run.over) for live in ranks]
    parts_s = {part: sum(parts[part] for parts in each) / len(each) for part in PARTS}
    return RunSoFar(wall_s, {part: value for part, value in parts_s.items() if value > 0})


def _parts(live: LiveRank, started_ns: int, until_ns: int, *, is_over: bool) -> dict[str, float]:
    """Seconds by part of one rank; together the time from start to end."""
    parts, left_s = dict.fromkeys(PARTS, 0.0), (until_ns - started_ns) / 1e9

    def take(part: str, value_s: float) -> None:
        nonlocal left_s
        parts[part] = min(max(value_s, 0.0), left_s)
        left_s -= parts[part]

    if live.joined_ns is not None:
        take("earlier_attempts" if live.restarts else "start", (live.joined_ns - started_ns) / 1e9)
    if not live.steps:
        take("preparation", left_s)
    if live.steps and (live.ended or is_over):
        take("end", (until_ns - live.steps[-1].end_ns) / 1e9)
    usual_s = (live.usual_ms() or 0.0) / 1e3
    if live.first_ms is not None:
        take("preparation", live.first_ms / 1e3 - usual_s)
    take("steps", live.steps_total * usual_s)
    take("other", left_s)
    return parts
