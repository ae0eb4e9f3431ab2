"""DDP's search for unused parameters, as the windows show it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import issue_time_ns
from ddpdoctor.measure.numerics import covered
from ddpdoctor.measure.window import Window, main_lane, rows_of

SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
"""The walk over the autograd graph (torch/csrc/distributed/c10d/reducer.cpp)."""
_SEARCHED = (SEARCH, "_DDPSink", "_DDPSinkBackward")
"""The walk, and what DDP then wraps the outputs in, forward and backward."""
_HOST_BOUND = 0.9
"""Of a step that its host needs to issue it, from which on the host sets the pace: the queue of launches empties between
steps, so that it is never all of it."""


def search_ms(windows: Sequence[Window], latency_us: float | None, searches: float) -> float | None:
    """What looking for unused parameters costs a step with so many searches: the walk over the graph, and one more message
    that tells the other ranks which were used. On a device no message, for it is sent beside the others, and only what its work
    hides not, unless the host sets the pace. None where no window shows a search."""
    per_search_ns = [
        spent_ns for window in windows if (spent_ns := _search_ns(window, latency_us)) is not None
    ]
    return searches * float(np.median(per_search_ns)) / 1e6 if per_search_ns else None


def _search_ns(window: Window, latency_us: float | None) -> float | None:
    """What one search costs a rank; None where its window shows none."""
    trace = window.trace
    own = trace.category_mask("cpu_op") & (trace.lane == main_lane(trace))
    walks = int((own & trace.name_mask(_is_search)).sum())
    if not walks:
        return None
    start, end = rows_of(trace, own & trace.name_mask(lambda name: name in _SEARCHED))
    spent = float((end - start).sum())
    if not window.on_device:
        return (spent + walks * (latency_us or 0.0) * 1e3) / walks
    if _host_bound(window):
        return spent / walks
    hidden = covered(window.compute, start + window.shifted_ns, end + window.shifted_ns)
    return (spent - float(hidden.sum())) / walks


def _host_bound(window: Window) -> bool:
    """Whether the host needs nearly all of the step to issue it, so that whatever it does takes longer for it."""
    lengths = [end - start for _, start, end in window.steps]
    return bool(lengths) and issue_time_ns(window) >= _HOST_BOUND * float(np.median(lengths))


def searches_unused(windows: Sequence[Window]) -> bool | None:
    """Whether DDP looks for unused parameters in the windows; None where they do not tell."""
    telling = [window.trace for window in windows if len(window.forwards)]
    return any(bool(trace.name_mask(_is_search).any()) for trace in telling) if telling else None


def _is_search(name: str) -> bool:
    return name == SEARCH
