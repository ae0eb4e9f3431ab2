"""Single messages of the gradients' reductions: how large they are, and what one costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import Window

from .bandwidth import latency_and_rate, transfers
from .marked import of_kind

_FEWEST_MESSAGES = 3
"""A line through two points fits any two; the third is the first that could contradict it."""


def size_buckets(windows: Sequence[Window], bucket_bytes: Sequence[float]) -> None:
    """Give Gloo's reductions (in place) the sizes of DDP's buckets, which come in this order in every
    backward pass."""
    count = len(bucket_bytes)
    for window in windows:
        comms = window.comms
        if not count or not np.isnan(comms.bytes).all():
            continue
        order = np.argsort(comms.issued, kind="stable")
        reductions = order[of_kind(window, SyncKind.GRADIENTS)[order]]
        issued = comms.issued[reductions]
        for _, start, end in window.steps:
            inside = reductions[(issued >= start) & (issued < end)]
            if len(inside) and len(inside) % count == 0:
                comms.bytes[inside] = np.resize(np.asarray(bucket_bytes, float), len(inside))


def message_cost(graph: Graph) -> tuple[float | None, float | None]:
    """(latency us per message, bytes per ns) of the gradients' reductions in the window."""
    reductions = [transfer for transfer in transfers(graph) if transfer.operation == "allreduce"]
    if len(reductions) < _FEWEST_MESSAGES:
        return None, None
    latency_ns, rate = latency_and_rate(
        np.array([transfer.bytes for transfer in reductions]),
        np.array([transfer.ns for transfer in reductions]),
    )
    return latency_ns / 1e3, rate
