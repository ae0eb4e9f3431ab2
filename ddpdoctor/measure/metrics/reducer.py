"""What a reduction of gradients costs the training thread itself, before the last gradient is ready.

On a CPU the reducer copies each gradient into its bucket and hands each full bucket to the backend in the middle of the
backward pass, on the thread that computes. A step log counts that as computation. It goes when the reduction goes
(``no_sync``), and the handing-over when buckets become fewer; the profiled window shows how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddpdoctor.measure.graph import pace_ns
from ddpdoctor.measure.numerics import covered, union
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.window import Window, main_lane, rows_of
from ddpdoctor.rundir import EventKind

_SEARCHES = "torch.distributed.ddp.reducer::search_unused_parameters"
_SEARCHED = (_SEARCHES, "_DDPSink", "_DDPSinkBackward")
"""The walk over the graph, and what DDP then wraps the outputs in, forward and backward."""
_HOST_BOUND = 0.9
_COPIES = "torch::distributed::reducer::"
_ISSUES = ("c10d::allreduce_", "c10d::allreduce_coalesced_")


@dataclass(frozen=True)
class ReducerWork:
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


def search_ms(windows: Sequence[Window], latency_us: float | None, searches: float) -> float | None:
    """What looking for unused parameters costs a step with so many searches: the walk over the graph, and one more message
    that tells the other ranks which were used. On a device no message, for it is sent beside the others, and only what its work
    hides not, unless the host sets the pace. None where no window shows a search."""
    found = []
    for window in windows:
        trace = window.trace
        own = trace.category_mask("cpu_op") & (trace.lane == main_lane(trace))
        walks = int((own & trace.name_mask(_is_search)).sum())
        if not walks:
            continue
        rows = own & trace.name_mask(lambda name: name in _SEARCHED)
        start, end = rows_of(trace, rows)
        spent = float((end - start).sum())
        if window.on_device and not _host_bound(window):
            spent -= float(covered(window.compute, start + window.shifted_ns, end + window.shifted_ns).sum())
        elif not window.on_device:
            spent += walks * (latency_us or 0.0) * 1e3
        found.append(spent / walks)
    return searches * float(np.median(found)) / 1e6 if found else None


def _host_bound(window: Window) -> bool:
    """Whether the host needs nearly all of the step to issue it, so that whatever it does takes longer for it."""
    lengths = [end - start for _, start, end in window.steps]
    return bool(lengths) and pace_ns(window) >= _HOST_BOUND * float(np.median(lengths))


def searches_unused(windows: Sequence[Window]) -> bool | None:
    """Whether DDP looks for unused parameters in the windows; None where they do not tell."""
    known = [window.trace for window in windows if len(window.forwards)]
    if not known:
        return None
    return any(bool(trace.name_mask(_is_search).any()) for trace in known)


def _is_search(name: str) -> bool:
    return name == _SEARCHES


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
