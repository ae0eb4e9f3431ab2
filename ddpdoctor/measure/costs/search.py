"""DDP's search for unused parameters."""

from __future__ import annotations

from ddpdoctor.measure.metrics import search_ms

from .context import Context, Costs

SEARCH = "ddp.search_ms"
"""Path of the fact."""


def unused_parameter_search(context: Context) -> Costs:
    """``ddp.search_ms``: plain milliseconds per step, by what the windows show of the search itself; {} where none does."""
    searches = context.reductions.syncs_per_step or 1.0
    ms = search_ms(context.windows, context.message.latency_us, searches)
    return {} if ms is None else {SEARCH: ms}
