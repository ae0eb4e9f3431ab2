"""Export all recordings on one clock as three tables: steps, collectives, events. For timelines and Parquet.

All times are int64 ns since 1970 on the common clock (the first host's), unless the traces have clocks of their own. If
there are both step logs and a profiler window with device events, the tables contain both, distinguished by ``source``.
Collectives then come from the window, because a host's log shows when they were issued, not when they ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from posixpath import basename

import msgspec
import numpy as np
import polars as pl

from ddpdoctor.measure.align import Matched, align_and_match, align_logs, exclude_suspended
from ddpdoctor.measure.metrics import readings
from ddpdoctor.measure.numerics import Intervals, Ints
from ddpdoctor.measure.sourcelines import Kind, Samples, samples_of
from ddpdoctor.measure.steplog import MatchedSync, RankLog, SyncPoint, match_syncs
from ddpdoctor.measure.taxonomy import DEVICE_COMPUTATION, NO_WORK
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.measure.window import UNKNOWN_STEP, Window, arrivals, main_lane, step_of
from ddpdoctor.trace import RankTrace, classify

LOG, TRACE = "step-log", "trace"

STEPS = {
    "rank": pl.Int32,
    "source": pl.String,
    "step": pl.Int64,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "marks": pl.String,
}
"""One row per rank and step. ``marks``: comma-separated flags of the step, such as profiled."""

COLLECTIVES = {
    "rank": pl.Int32,
    "source": pl.String,
    "step": pl.Int64,
    "kind": pl.String,
    "operation": pl.String,
    "group": pl.String,
    "arrival_ns": pl.Int64,
    "last_arrival_ns": pl.Int64,
    "end_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "transfer_ns": pl.Int64,
    "message_bytes": pl.Float64,
}
"""One row per rank and collective. ``wait_ns`` is from the rank's own arrival to the last arrival (for a broadcast in a step log, to
the root's arrival; traces do not name the root). ``transfer_ns`` is from there to the rank's own end. Both, and ``last_arrival_ns``, are
null if the collective was not matched across the ranks. ``kind``: gradients, barrier, collective, broadcast, model. ``step`` is null
outside the recorded steps."""

EVENTS = {
    "rank": pl.Int32,
    "source": pl.String,
    "step": pl.Int64,
    "track": pl.String,
    "name": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
}
"""One row per interval of work. ``track``: compute or host. ``name``: data, epoch_start, copy, forward (on a device: all computation
except the optimizer's and that between phases), backward, optimizer, loss and outside (operators between phases, only from windows),
collection (of garbage), checkpoint, device_sync (the device is idle because the host waited for it) and launch (the device is idle while
the host issues work). ``step``: the step in which it begins, null outside the recorded steps."""


class Tables(msgspec.Struct, frozen=True):
    """The tables of all ranks, on one clock."""

    steps: pl.DataFrame
    collectives: pl.DataFrame
    events: pl.DataFrame
    details: pl.DataFrame
    """For timelines; schema :data:`DETAILS`."""
    counters: pl.DataFrame
    """For timelines; schema :data:`COUNTERS`."""
    hosts: dict[int, str] = msgspec.field(default_factory=dict)
    """Rank → host name; without ranks whose host is unknown."""
    notes: list[str] = msgspec.field(default_factory=list)


def recorded_tables(
    recorded: Sequence[RankLog], windows: Sequence[Window], telemetry: Mapping[str, HostTelemetry]
) -> Tables:
    """Align the recordings and build the tables."""
    nonempty_logs = [log for log in recorded if log.steps]
    aligned, notes = align_logs(nonempty_logs)
    logs, _ = exclude_suspended(aligned, telemetry)
    use_windows = any(window.on_device for window in windows) or not logs
    aligned_windows, matched = align_and_match(windows if use_windows else [])
    if matched.refused:
        notes.append(f"Collectives could not be matched across ranks: {matched.refused}.")
    steps = [
        (log.rank, LOG, step.number, step.start_ns, step.end_ns, ",".join(step.marks))
        for log in logs
        for step in log.steps
    ]
    events = [row for log in logs for row in _log_events(log)]
    for window in aligned_windows:
        events += _window_events(window)
        if not logs:
            steps += [(window.rank, TRACE, n, a, b, "") for n, a, b in window.steps]
    collectives = _window_collectives(aligned_windows, matched) if aligned_windows else _log_collectives(logs)
    moved_ns = {
        log.rank: log.steps[0].start_ns - before.steps[0].start_ns
        for before, log in zip(nonempty_logs, aligned, strict=True)
    }
    detailed = aligned_windows or [window.shifted(moved_ns.get(window.rank, 0)) for window in windows]
    return Tables(
        pl.DataFrame(steps, schema=STEPS, orient="row").sort("rank", "start_ns"),
        pl.DataFrame(collectives, schema=COLLECTIVES, orient="row").sort("rank", "arrival_ns"),
        pl.DataFrame(events, schema=EVENTS, orient="row").sort("rank", "source", "track", "start_ns"),
        details(aligned, detailed),
        counters(telemetry),
        {w.rank: w.host for w in windows if w.host} | {log.rank: log.host for log in logs if log.host},
        notes,
    )


def _log_events(log: RankLog) -> list[tuple[object, ...]]:
    done, numbers = log.activities, np.array([*(step.number for step in log.steps), UNKNOWN_STEP])

    def step_at(at: Ints) -> Ints:
        return numbers[log.steps_at(at)]

    return [
        row
        for name, work in done.sets.items()
        for row in _rows(log.rank, LOG, name, work, done.origin_ns, step_at)
    ]


def _window_events(window: Window) -> list[tuple[object, ...]]:
    def step_at(at: Ints) -> Ints:
        return step_of(window, at) if window.steps else np.full(len(at), UNKNOWN_STEP)

    return [
        row
        for name, work in window.sets.items()
        if name not in NO_WORK
        for row in _rows(window.rank, TRACE, name, work, 0, step_at)
    ]


def _rows(
    rank: int, source: str, name: str, intervals: Intervals, origin: int, step_at: Callable[[Ints], Ints]
) -> list[tuple[object, ...]]:
    track = "compute" if name in DEVICE_COMPUTATION else "host"
    starts, ends = (side.astype(np.int64) + origin for side in intervals)
    return [
        (rank, source, step if step != UNKNOWN_STEP else None, track, name, start, end - start)
        for step, start, end in zip(step_at(starts).tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]


def _log_collectives(logs: Sequence[RankLog]) -> list[tuple[object, ...]]:
    ranks = [log.rank for log in logs]
    matched, _ = match_syncs([log.sync_points for log in logs])
    by_point = {(sync.key, position): sync for sync in matched for position in sync.points}
    return [
        _log_collective(ranks, position, point, by_point.get((point.key, position)))
        for position, log in enumerate(logs)
        for point in log.sync_points
    ]


def _log_collective(
    ranks: list[int], position: int, point: SyncPoint, matched: MatchedSync | None
) -> tuple[object, ...]:
    last = None
    if matched is not None:
        root = matched.points.get(ranks.index(point.root)) if point.root in ranks else None
        last = root.arrival_ns if root is not None else matched.last_arrival_ns
    what = (point.kind, point.name, point.group)
    times = _times(point.arrival_ns, last, max(point.end_ns, point.arrival_ns))
    return (ranks[position], LOG, point.step, *what, *times, point.message_bytes)


def _window_collectives(windows: Sequence[Window], matched: Matched) -> list[tuple[object, ...]]:
    arrivals_ns = [arrivals(window)[0] for window in windows]
    last = [np.full(len(window.collectives), -1, np.int64) for window in windows]
    for match in matched.rows if not matched.refused else ():
        latest = max(int(arrivals_ns[r][row]) for r, row in enumerate(match) if row >= 0)
        for r, row in enumerate(match):
            if row >= 0:
                last[r][row] = latest
    rows: list[tuple[object, ...]] = []
    for window, arrival, latest_of in zip(windows, arrivals_ns, last, strict=True):
        comms, steps = window.collectives, step_of(window, window.collectives.issued)
        for i in range(len(comms)):
            size = float(comms.bytes[i])
            last_arrival = int(latest_of[i]) if latest_of[i] >= 0 else None
            step = int(steps[i]) if steps[i] >= 0 and window.steps else None
            what = (comms.kind[i], comms.operation[i], comms.group[i])
            times = _times(int(arrival[i]), last_arrival, int(comms.end[i]))
            rows.append((window.rank, TRACE, step, *what, *times, None if np.isnan(size) else size))
    return rows


def _times(arrival: int, last: int | None, end: int) -> tuple[int | None, ...]:
    """The columns arrival, last arrival, end, wait and transfer."""
    if last is None:
        return arrival, None, end, None, None
    release = min(max(last, arrival), end)
    return arrival, last, end, release - arrival, end - release


class Tuning(msgspec.Struct, frozen=True):
    """Limits of what is exported."""

    most_rows: int = 150_000
    """Detail rows of all ranks together. Perfetto opens a file of twice as many slices within seconds."""
    fewest_rows: int = 500
    """Detail rows of each rank, for any number of ranks."""
    nested: int = 3
    """Levels of nested operators. Deeper ones are the launches of the outer ones."""
    most_characters: int = 120
    """Characters of a name. Names of kernel templates have thousands."""
    pause_ratio: float = 3.0
    """Multiple of the median sampling interval beyond which the sampler was paused and the line is unknown."""
    most_readings: int = 2_000
    """Readings of one counter."""


TUNING = Tuning()

DETAILS = {
    "rank": pl.Int32,
    "track": pl.String,
    "name": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
}
"""One row per slice of a timeline. ``track``: annotations, operators (of the training thread; for other threads, with their number),
stream N (the device's work there, by kernel name) or sampled lines (of the training thread, from stack samples)."""

COUNTERS = {
    "source": pl.String,
    "field": pl.String,
    "unit": pl.String,
    "time_ns": pl.Int64,
    "value": pl.Float64,
}
"""One row per reading of a host or one of its GPUs."""


def details(logs: Sequence[RankLog], windows: Sequence[Window]) -> pl.DataFrame:
    """Return the details of recordings on one clock; schema :data:`DETAILS`."""
    ranks = len({log.rank for log in logs} | {window.rank for window in windows})
    most = max(TUNING.most_rows // max(ranks, 1), TUNING.fewest_rows)
    tables = [
        *(pl.concat([*_window_details(window)]) for window in windows),
        *_sampled_lines(samples_of(logs)),
    ]
    longest = [table if len(table) <= most else table.top_k(most, by="duration_ns") for table in tables]
    return pl.concat([pl.DataFrame(schema=DETAILS), *longest]).sort("rank", "track", "start_ns")


def counters(telemetry: Mapping[str, HostTelemetry]) -> pl.DataFrame:
    """Return the counters of all hosts, each on its own clock; schema :data:`COUNTERS`."""
    rows: list[tuple[object, ...]] = []
    for _, source, field, unit, times, values in readings(telemetry):
        stride = -(-len(values) // TUNING.most_readings) or 1
        known = ~np.isnan(values[::stride])
        thinned = zip(times[::stride][known].tolist(), values[::stride][known].tolist(), strict=True)
        rows += [(source, field, unit, time, value) for time, value in thinned]
    return pl.DataFrame(rows, schema=COUNTERS, orient="row")


def _window_details(window: Window) -> Iterator[pl.DataFrame]:
    trace = window.trace
    yield pl.DataFrame(schema=DETAILS)
    marks = trace.name_mask(lambda name: classify.step_number(name) is not None)
    yield _slices(window, "annotations", np.flatnonzero(trace.category_mask("user_annotation") & ~marks))
    operators = trace.category_mask("cpu_op") & ~marks
    training = main_lane(trace)
    for number, lane in enumerate(
        sorted(np.unique(trace.lane[operators]).tolist(), key=lambda lane: lane != training)
    ):
        label = "operators" if lane == training else f"operators, thread {number + 1}"
        yield _slices(window, label, _outermost(trace, np.flatnonzero(operators & (trace.lane == lane))))
    work = classify.device_work(trace)
    for stream in np.unique(trace.stream[work]).tolist():
        label = "device" if stream < 0 else f"stream {stream}"
        yield _slices(window, label, np.flatnonzero(work & (trace.stream == stream)))


def _slices(window: Window, track: str, rows: Ints) -> pl.DataFrame:
    trace = window.trace
    names = [trace.names[name][: TUNING.most_characters] for name in trace.name[rows].tolist()]
    start = trace.start_ns[rows] + window.shifted_ns
    return _table(window.rank, track, names, start, trace.duration_ns[rows])


def _table(rank: int, track: str, names: list[str], start: Ints, duration: Ints) -> pl.DataFrame:
    """A table of slices, without those of zero length."""
    tracks = np.full(len(names), rank, np.int32), [track] * len(names)
    columns = dict(zip(DETAILS, (*tracks, names, start, duration), strict=True))
    return pl.DataFrame(columns, schema=DETAILS).filter(pl.col("duration_ns") > 0)


def _outermost(trace: RankTrace, rows: Ints) -> Ints:
    """The ``rows`` (of one thread, in order of start) that are nested in fewer than ``TUNING.nested`` others."""
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


def _sampled_lines(samples: Samples) -> Iterator[pl.DataFrame]:
    """One table per rank. Consecutive samples of one script line are one row, up to the next sample of another line."""
    innermost = [stack.lines[0] for stack in samples.stacks]
    names, name = np.unique(
        [f"{basename(line.file)}:{line.line} {line.function}" for line in innermost], return_inverse=True
    )
    before = name.copy()
    before[samples.gil_owners.follower] = name[samples.gil_owners.owner]  # the most likely owner comes last
    for of_rank in samples.ranks:
        at = np.flatnonzero((of_rank.stack >= 0) & (of_rank.kind != Kind.BURST))
        if len(at) < 2:
            continue
        stack, follows = of_rank.stack[at], of_rank.kind[at] == Kind.FOLLOWING
        times, lines = of_rank.time_ns[at], np.where(follows, before[stack], name[stack])
        intervals = np.diff(times)
        known = intervals <= TUNING.pause_ratio * float(np.median(intervals))
        begins = np.flatnonzero(np.append(True, (np.diff(lines) != 0) | ~known))
        last = np.append(begins[1:], len(at)) - 1
        # A row ends at the next sample, unless the sampler was paused.
        until = np.where(np.append(known, False)[last], times[np.minimum(last + 1, len(at) - 1)], times[last])
        labels, start = names[lines[begins]].tolist(), times[begins]
        yield _table(of_rank.log.rank, "sampled lines", labels, start, until - start)
