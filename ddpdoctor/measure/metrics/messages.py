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
    """(latency us per message, bytes per ns) of the gradients' reductions in the window; ``hosts`` by position."""
    known = transfers(graph, hosts)
    reductions = [of for of in known if of.operation == "allreduce" and of.kind == SyncKind.GRADIENTS]
    reductions = of_longest(reductions, [of.ns for of in reductions])
    if len(reductions) < _FEWEST_MESSAGES:
        return None, None
    latency_ns, rate = latency_and_rate(
        np.array([transfer.bytes for transfer in reductions]),
        np.array([transfer.ns for transfer in reductions]),
    )
    return latency_ns / 1e3, rate
