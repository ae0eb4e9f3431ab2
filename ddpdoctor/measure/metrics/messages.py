"""Single messages of the gradients' reductions: how large they are, and what one costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.taxonomy import SyncKind

from .bandwidth import latency_and_rate, of_longest, transfers

_FEWEST_MESSAGES = 3
"""A line through two points fits any two; the third is the first that could contradict it."""


def message_cost(graph: Graph, hosts: Sequence[str]) -> tuple[float | None, float | None]:
    """(latency us per message, bytes per ns) of all reductions in the window by such process groups as reduce the gradients; ``hosts``
    by position."""
    reductions = [of for of in transfers(graph, hosts) if of.operation == "allreduce"]
    gradients_ns = [of.ns if of.kind == SyncKind.GRADIENTS else 0.0 for of in reductions]
    reductions = of_longest(reductions, gradients_ns)
    if len(reductions) < _FEWEST_MESSAGES:
        return None, None
    latency_ns, rate = latency_and_rate(
        np.array([transfer.bytes for transfer in reductions]),
        np.array([transfer.ns for transfer in reductions]),
    )
    return latency_ns / 1e3, rate
