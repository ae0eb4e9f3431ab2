"""One file of the PyTorch profiler's JSON → one rank's columns."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.sources import Source

from .build import ColumnBuilder
from .foreign import is_foreign, is_own_timeline
from .meta import base_time_ns, meta_of
from .stream import EventStream


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`. Plain, gzip or zstd."""
    stream = EventStream(Source(path))
    builder = ColumnBuilder()
    with _without_garbage_collection():
        for batch in stream.batches():
            builder.add(batch, stream)
    base_ns = base_time_ns(stream)
    builder.leave_out_beyond(base_ns)
    if not builder.rows:
        raise UnusableInput(_no_rows(path, stream, builder))
    if is_own_timeline(stream.top):
        raise UnusableInput(
            f"{path} is a timeline that ddpdoctor exported: name the run or the traces it was made from."
        )
    if builder.lanes.of_ascend:
        # Its events have no categories there, so that a job on NPUs would be taken for one on CPUs.
        raise UnusableInput(
            f"{path} is a timeline of Ascend's torch_npu.profiler: what ran on the NPU has names of its own there, which ddpdoctor "
            "does not know."
        )
    trace = builder.finish(meta_of(path, rank, base_ns, stream, builder), base_ns)
    if is_foreign(stream.top, trace.categories, trace.names):
        raise UnusableInput(
            f"{path} is not a PyTorch profiler trace: it has no torch operator, kernel, collective or "
            "profiler step."
        )
    return trace


def _no_rows(path: str, stream: EventStream, builder: ColumnBuilder) -> str:
    if stream.too_deep:
        return f"{path} cannot be read: it is nested too deeply."
    if stream.source.broken:
        why = f"it {stream.source.broken}"
    elif builder.events:
        why = "none of its events has a begin and a duration"
    else:
        why = "its list of events is empty"
    return f"{path} holds no profiler events: {why}."


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A decode allocates a million objects and frees them by reference count: collections would only cost time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
