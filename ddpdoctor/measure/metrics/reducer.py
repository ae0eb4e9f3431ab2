"""What a reduction of gradients costs the training thread itself, before the last gradient is ready.

On a CPU the reducer copies each gradient into its bucket and hands each full bucket to the backend in the middle of the
backward pass, on the thread that computes. A step log counts that as computation. It goes when the reduction goes
(``no_sync``), and the handing-over when buckets become fewer; the profiled window shows how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import covered, union
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.window import Window, main_lane, rows_of
from ddpdoctor.rundir import EventKind

_COPIES = "torch::distributed::reducer::"
"""How the names of the reducer's own copies begin (torch/csrc/distributed/c10d/reducer.cpp)."""
_ISSUES = ("c10d::allreduce_", "c10d::allreduce_coalesced_")
"""Operators that hand a bucket to the backend (torch/csrc/distributed/c10d/Ops.cpp)."""


class ReducerWork(msgspec.Struct, frozen=True):
    """Means over the reductions that the window shows, on one rank."""

    whole_ns: float
    """Copying and issuing in one backward pass, up to the arrival of the rank (its last gradient)."""
    issue_ns: float
    """Issuing one bucket."""


def reducer_work(logs: Sequence[RankLog], windows: Sequence[Window]) -> list[ReducerWork | None]:
    """By position of the log; None for ranks whose window shows no reduction, and for devices, beside whose work the host
    does this."""
    by_rank = {window.rank: window for window in windows if not window.on_device}
    return [_of_rank(log, by_rank[log.rank]) if log.rank in by_rank else None for log in logs]


def _of_rank(log: RankLog, window: Window) -> ReducerWork | None:
    passes = [
        (step.start_of(event), step.start_ns + event.gradients_ready_ns, step.end_of(event))
        for step in log.steps
        for event in step.events
        if event.kind == EventKind.BACKWARD
        and event.reductions
        and step.start_of(event) >= window.span[0]
        and step.end_of(event) <= window.span[1]
    ]
    if not passes:
        return None
    trace = window.trace
    own = trace.category_mask("cpu_op") & (trace.lane == main_lane(trace))
    copies = rows_of(trace, own & trace.name_mask(lambda name: name.startswith(_COPIES)))
    issues = rows_of(trace, own & trace.name_mask(lambda name: name in _ISSUES))
    start, arrival, stop = (np.array(times) for times in zip(*passes, strict=True))
    both = union(np.concatenate((copies[0], issues[0])), np.concatenate((copies[1], issues[1])))
    # What is issued elsewhere is the script's own, such as metrics.
    index = np.searchsorted(start, issues[0], side="right") - 1
    inside = (index >= 0) & (issues[0] < stop[np.maximum(index, 0)])
    if not inside.any():
        return None
    return ReducerWork(
        whole_ns=float(covered(both, start, arrival).mean()),
        issue_ns=float((issues[1] - issues[0])[inside].mean()),
    )
