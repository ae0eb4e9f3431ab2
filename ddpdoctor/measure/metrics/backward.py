"""The backward pass in a window: how long it is, when its first bucket starts, and whether all come behind it."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.numerics import covered
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import Window, launched_inside, launches, step_of_collectives
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
    start, end = trace.start_ns[rows] + window.shifted_ns, trace.end_ns[rows] + window.shifted_ns
    host = trace.start_ns[calls] + window.shifted_ns
    reduced = of_kind(window, SyncKind.GRADIENTS)
    lengths_ms, shares = [], []
    for _, low, high in window.steps:
        own = (host >= low) & (host < high)
        issued = reduced & (window.collectives.issued >= low) & (window.collectives.issued < high)
        if not own.any() or not issued.any():
            continue
        begin, stop = float(start[own].min()), float(end[own].max())
        lengths_ms.append((stop - begin) / 1e6)
        shares.append((float(window.collectives.start[issued].min()) - begin) / max(stop - begin, 1.0))
    if not lengths_ms:
        return None
    return float(np.median(lengths_ms)), float(np.clip(np.median(shares), 0, 1))


def reduces_behind(window: Window) -> bool:
    """Whether two reductions of gradients or more follow each other in each step, with next to no computation beside or between
    them: then the backward pass is over when the first begins, whatever else the trace lacks."""
    reduced, step = of_kind(window, SyncKind.GRADIENTS), step_of_collectives(window)
    shares = []
    for number, _, _ in window.steps:
        own = reduced & (step == number)
        if own.sum() > 1:
            begin, stop = window.collectives.start[own].min(), window.collectives.end[own].max()
            computed = float(covered(window.compute, np.array([begin]), np.array([stop]))[0])
            shares.append(computed / max(float(stop - begin), 1.0))
    return bool(shares) and float(np.median(shares)) <= _AMONG
