"""Additional tracks of a timeline: annotations, operators, kernels, sampled lines, and counters of the hosts.

Their number is limited, as a browser must open the file: the longest are kept, the same number of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from posixpath import basename

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from ddpdoctor.measure.metrics import readings
from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.sourcelines import Kind, Samples, samples_of
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.measure.window import Window, main_lane
from ddpdoctor.trace import RankTrace, classify


class Tuning(msgspec.Struct, frozen=True):
    """How many details are kept."""

    most_rows: int = 150_000
    """Of all ranks together: Perfetto opens a file of twice as many slices within seconds."""
    fewest_rows: int = 500
    """Of each rank, however many ranks there are."""
    nested: int = 3
    """Levels of nested operators: deeper ones are the launches of the outer ones."""
    most_letters: int = 120
    """Most characters of a name: kernel templates take thousands."""
    usual_gap: float = 3.0
    """Multiple of the usual distance of two samples beyond which the sampler was paused, and nothing is known."""
    most_readings: int = 2_000
    """Most readings of one counter."""


TUNING = Tuning()

DETAILS = {
    "rank": pl.Int32,
    "track": pl.String,
    "name": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
}
"""One row for each of them. ``track``: annotations, operators (of the training thread; of others with their number), stream N (what
a device did there, by the names of its kernels) or sampled lines (of the training thread, from stack samples)."""

COUNTERS = {
    "source": pl.String,
    "field": pl.String,
    "unit": pl.String,
    "time_ns": pl.Int64,
    "value": pl.Float64,
}
"""One row for each reading of a host or one of its GPUs."""


def details(logs: Sequence[RankLog], windows: Sequence[Window]) -> pl.DataFrame:
    """Details of recordings on one clock, schema :data:`DETAILS`."""
    ranks = len({log.rank for log in logs} | {window.rank for window in windows})
    most = max(TUNING.most_rows // max(ranks, 1), TUNING.fewest_rows)
    tables = [_longest(pl.concat([*_of_window(window)]), most) for window in windows]
    tables += [_longest(table, most) for table in _sampled(samples_of(logs))]
    return pl.concat([pl.DataFrame(schema=DETAILS), *tables]).sort("rank", "track", "start_ns")


def counters(telemetry: Mapping[str, HostTelemetry]) -> pl.DataFrame:
    """Counters of all hosts, each on its own clock, schema :data:`COUNTERS`."""
    rows = [
        (source, field, unit, time, value)
        for _, source, field, unit, times, values in readings(telemetry)
        for time, value in _thinned(times, values)
    ]
    return pl.DataFrame(rows, schema=COUNTERS, orient="row")


def _thinned(times: Ints, values: NDArray[np.float64]) -> Iterator[tuple[int, float]]:
    stride = -(-len(values) // TUNING.most_readings) or 1
    known = ~np.isnan(values[::stride])
    return zip(times[::stride][known].tolist(), values[::stride][known].tolist(), strict=True)


def _longest(table: pl.DataFrame, most: int) -> pl.DataFrame:
    return table if len(table) <= most else table.top_k(most, by="duration_ns")


def _of_window(window: Window) -> Iterator[pl.DataFrame]:
    trace = window.trace
    yield pl.DataFrame(schema=DETAILS)
    marks = trace.name_mask(lambda name: classify.step_number(name) is not None)
    yield _rows(window, "annotations", np.flatnonzero(trace.category_mask("user_annotation") & ~marks))
    operators = trace.category_mask("cpu_op") & ~marks
    training = main_lane(trace)
    for number, lane in enumerate(
        sorted(np.unique(trace.lane[operators]).tolist(), key=lambda lane: lane != training)
    ):
        label = "operators" if lane == training else f"operators, thread {number + 1}"
        yield _rows(window, label, _outer(trace, np.flatnonzero(operators & (trace.lane == lane))))
    work = classify.device_work(trace)
    for stream in np.unique(trace.stream[work]).tolist():
        label = "device" if stream < 0 else f"stream {stream}"
        yield _rows(window, label, np.flatnonzero(work & (trace.stream == stream)))


def _rows(window: Window, track: str, rows: Ints) -> pl.DataFrame:
    trace = window.trace
    names = [trace.names[name][: TUNING.most_letters] for name in trace.name[rows].tolist()]
    start = trace.start_ns[rows] + window.shifted_ns
    return _table(window.rank, track, names, start, trace.duration_ns[rows])


def _table(rank: int, track: str, names: list[str], start: Ints, duration: Ints) -> pl.DataFrame:
    """A table of slices, without those of zero length."""
    tracks = np.full(len(names), rank, np.int32), [track] * len(names)
    columns = dict(zip(DETAILS, (*tracks, names, start, duration), strict=True))
    return pl.DataFrame(columns, schema=DETAILS).filter(pl.col("duration_ns") > 0)


def _outer(trace: RankTrace, rows: Ints) -> Ints:
    """Those of ``rows``, of one thread and in order, nested in fewer than ``TUNING.nested`` others."""
    open_until: list[int] = []
    kept = []
    ends = trace.end_ns[rows].tolist()
    for row, start, end in zip(rows.tolist(), trace.start_ns[rows].tolist(), ends, strict=True):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if len(open_until) < TUNING.nested:
            kept.append(row)
        open_until.append(end)
    return np.array(kept, np.int64)


def _sampled(samples: Samples) -> Iterator[pl.DataFrame]:
    """One table per rank: consecutive samples of one line of the script are one row, up to the next sample of another line."""
    shown = [stack.lines[0] for stack in samples.stacks]
    names, name = np.unique(
        [f"{basename(line.file)}:{line.line} {line.function}" for line in shown], return_inverse=True
    )
    before = name.copy()
    before[samples.gil_owners.follower] = name[samples.gil_owners.owner]  # the likeliest is the last
    for of_rank in samples.ranks:
        at = np.flatnonzero((of_rank.stack >= 0) & (of_rank.kind != Kind.BURST))
        if len(at) < 2:
            continue
        stack, follows = of_rank.stack[at], of_rank.kind[at] == Kind.FOLLOWING
        times, lines = of_rank.time_ns[at], np.where(follows, before[stack], name[stack])
        apart = np.diff(times)
        known = apart <= TUNING.usual_gap * float(np.median(apart))
        begins = np.flatnonzero(np.append(True, (np.diff(lines) != 0) | ~known))
        last = np.append(begins[1:], len(at)) - 1
        # Until the next sample, where the sampler was not paused.
        until = np.where(np.append(known, False)[last], times[np.minimum(last + 1, len(at) - 1)], times[last])
        said, start = names[lines[begins]].tolist(), times[begins]
        yield _table(of_rank.log.rank, "sampled lines", said, start, until - start)
