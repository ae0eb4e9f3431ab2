"""The backward pass in a window: how long it is, when its first bucket starts, and whether all come behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddpdoctor.measure.numerics import Ints, covered
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import UNKNOWN_STEP, Window, launched_inside, launches, step_of_collectives
from ddpdoctor.trace import classify

from .marked import of_kind

_ENGINE = "autograd::engine::evaluate_function"
"""How the autograd engine's own events begin (torch/csrc/autograd/engine.cpp)."""
_AMONG = 0.1
"""Part of the time from the first to the last reduction of a step in which something may be computed, though no backward pass
goes on: buckets are copied into their gradients."""


def backward_of(window: Window) -> tuple[float, float] | None:
    """(length of a backward pass in ms, when its first bucket starts as a share of it), medians over the
    steps.

    The backward pass is what the autograd engine's thread launches; on a CPU, what it computes.
    """
    trace = window.trace
    engine = trace.category_mask("cpu_op") & np.isin(
        trace.name, trace.name_ids(lambda name: name.startswith(_ENGINE))
    )
    if not engine.any() or not window.steps:
        return None
    if window.on_device:
        # The device runs behind the host, by more than a step at times: its kernels belong to the step that launched them.
        rows = np.flatnonzero(launched_inside(trace, engine) & ~classify.communication_kernels(trace))
        calls = launches(trace, rows)
        rows, calls = rows[calls >= 0], calls[calls >= 0]
    else:
        rows = calls = np.flatnonzero(engine)
    host = trace.start_ns[calls] + window.shifted_ns
    reduced = np.flatnonzero(of_kind(window, SyncKind.GRADIENTS))
    lengths_ms, shares = [], []
    of_steps = zip(
        _in_steps(window, host), _in_steps(window, window.collectives.issued[reduced]), strict=True
    )
    for own, issued in of_steps:
        if not len(own) or not len(issued):
            continue
        begin = float(trace.start_ns[rows[own]].min() + window.shifted_ns)
        stop = float(trace.end_ns[rows[own]].max() + window.shifted_ns)
        lengths_ms.append((stop - begin) / 1e6)
        shares.append(
            (float(window.collectives.start[reduced[issued]].min()) - begin) / max(stop - begin, 1.0)
        )
    if not lengths_ms:
        return None
    return float(np.median(lengths_ms)), float(np.clip(np.median(shares), 0, 1))


def _in_steps(window: Window, at: Ints) -> Iterator[Ints]:
    """For each marked step, which of the host times lie in it."""
    order = np.argsort(at, kind="stable")
    bounds = np.array([(low, high) for _, low, high in window.steps], np.int64)
    for first, behind in np.searchsorted(at[order], bounds):
        yield order[first:behind]


def reduces_behind(window: Window) -> bool:
    """Whether two reductions of gradients or more follow each other in each step, with next to no computation beside or between
    them: then the backward pass is over when the first begins, whatever else the trace lacks."""
    step = np.where(of_kind(window, SyncKind.GRADIENTS), step_of_collectives(window), UNKNOWN_STEP)
    order = np.argsort(step, kind="stable")
    numbers, first, count = np.unique(step[order], return_index=True, return_counts=True)
    several = (count > 1) & (numbers != UNKNOWN_STEP)
    if not window.steps or not several.any():
        return False
    begin = np.minimum.reduceat(window.collectives.start[order], first)[several]
    stop = np.maximum.reduceat(window.collectives.end[order], first)[several]
    shares = covered(window.compute, begin, stop) / np.maximum(stop - begin, 1)
    return float(np.median(shares)) <= _AMONG
