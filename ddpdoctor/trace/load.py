"""Reads traces in parallel and selects those of one recording of one job: one trace per rank, cut where the recording of its host ends.

Unreadable files, traces of another recording and further windows of a rank are skipped, which is noted. If the traces are of different jobs
and the user has not chosen one, that is an error.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import ranks_in_words
from ddpdoctor.trace.archive import is_archive
from ddpdoctor.trace.columns import RUNTIME_CALLS, InternPool, RankTrace
from ddpdoctor.trace.formats import file_of
from ddpdoctor.trace.processes import (
    Engine,
    ProgressCallback,
    Result,
    Task,
    keep_freed_memory,
    read_in_processes,
    read_serially,
)
from ddpdoctor.trace.sources import is_url, redact_url

_WORTH_PROCESSES_BYTES = 5 << 20
"""Worker processes save time if they take over the reading of more than this many compressed bytes, which is about 0.8 s of reading: a
process takes 0.35 s to start, plus the time to send its columns."""
_UNKNOWN_BYTES = 8 << 20
"""Assumed size of a file at a URL."""
_WORTH_KEEPING_BYTES = 16 << 20
"""The cache is used if the JSON of all files is larger than this. Smaller files are parsed as fast as cached columns are opened."""
_COMPRESSION_RATIO = 12
"""Approximate ratio of a trace's JSON to its compressed size."""


class LoadedTraces(msgspec.Struct):
    """The traces of one job, sorted by rank; notes for the report; (file, reason) for each file that could not be read."""

    traces: list[RankTrace] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    failed: list[tuple[str, str]] = msgspec.field(default_factory=list)


def load_traces(
    files: Sequence[str],
    *,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
    ranks: Mapping[str, int] | None = None,
    cache: bool = False,
    engine: str | None = None,
    job: int | None = None,
) -> LoadedTraces:
    """Reads ``files`` and keeps one trace per rank of one job, cut by :func:`within_host_recording`.

    ``jobs``, ``ranks``, ``cache``, ``engine``, ``progress``: see :func:`read_traces`. ``job``: number of the job to select, as listed in
    the error message. Raises :class:`UnusableInput` if no file can be read, if the traces are of several jobs and none is selected, or if
    there is no job with this number.
    """
    loaded: dict[int, RankTrace] = {}
    failed: dict[int, str] = {}
    shared = InternPool()
    read = read_traces(files, jobs=jobs, progress=progress, ranks=ranks, cache=cache, engine=engine)
    for number, trace, reason in read:
        if trace is None:
            failed[number] = reason
        else:
            loaded[number] = shared.intern(trace) if len(files) > 1 else trace
    if not loaded:
        if not files:
            raise UnusableInput("No profiler trace to read.")
        first = failed[min(failed)]
        many = f"None of the {len(files)} files can be used; the first: {first}"
        raise UnusableInput(first if len(failed) == 1 else many)
    traces, notes = select_job([loaded[i] for i in sorted(loaded)], job)
    notes[:0] = _merged_notes(traces)
    cut = [within_host_recording(trace) for trace in traces]
    return LoadedTraces(cut, notes, [(files[i], failed[i]) for i in sorted(failed)])


def _merged_notes(traces: Sequence[RankTrace]) -> list[str]:
    """The notes of ``traces``. Equal notes are merged, for example to ``rank0.sqlite and 2 more (ranks 1 and 2): no NVTX range ...``."""
    sources: dict[str, list[RankTrace]] = {}
    for trace in traces:
        for note in trace.meta.notes:
            same = note.removeprefix(trace.meta.source)
            sources.setdefault(same if same.startswith(":") else note, []).append(trace)
    return [_sources_of(noted) + note if note.startswith(":") else note for note, noted in sources.items()]


def _sources_of(traces: Sequence[RankTrace]) -> str:
    first, *others = traces
    if not others:
        return first.meta.source
    files = {file_of(trace.meta.source) for trace in traces}
    if len(files) == 1:
        return f"{'both' if len(traces) == 2 else f'all {len(traces)}'} processes of {files.pop()}"
    known = [trace.meta.rank for trace in others if trace.meta.rank is not None and trace.meta.rank_from]
    ranks = f" ({ranks_in_words(known)})" if len(known) == len(others) else ""
    return f"{first.meta.source} and {len(others)} more{ranks}"


def _redacted(file: str, trace: RankTrace | None, reason: str) -> tuple[RankTrace | None, str]:
    """``trace`` and ``reason``, in which source, notes and reason no longer contain the secrets in the URL ``file``."""
    public = redact_url(file)
    if public == file:
        return trace, reason
    if trace is None:
        return None, reason.replace(file, public)
    notes = tuple(note.replace(file, public) for note in trace.meta.notes)
    return replace(trace, meta=replace(trace.meta, source=public, notes=notes)), reason


def read_traces(
    files: Sequence[str],
    *,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
    ranks: Mapping[str, int] | None = None,
    cache: bool = False,
    engine: str | None = None,
) -> Iterator[Result]:
    """Yields (index in ``files``, trace or None, reason if there is no trace) for each file as soon as it has been read.

    ``jobs``: maximum number of processes (default: one per processor). ``progress`` is called with the share of the files' bytes that has
    been read, 0 to 1. ``ranks``: rank by file, if known. ``cache``: use the cache of parsed columns if the files are large enough.
    ``engine``: see :func:`.clusters.open_engine` (default: processes of this machine).
    """
    keep_freed_memory()
    known = ranks or {}
    keep = cache and _worth_keeping(files)
    work = [Task(i, file, known.get(file), keep) for i, file in enumerate(files)]
    parts = _ByteProgress(files, progress)
    for number, trace, reason in _engine(files, jobs, engine, parts.tell)(work):
        yield (number, *_redacted(files[number], trace, reason))
        parts.tell(number, 1.0)


class _ByteProgress:
    """Progress of reading all files, weighted by their sizes."""

    def __init__(self, files: Sequence[str], progress: Callable[[float], None] | None) -> None:
        self._progress = progress
        self._bytes = [max(size, 1) for size in _sizes(files)] if progress is not None else []
        self._whole_bytes = sum(self._bytes)
        self._done = [0.0] * len(self._bytes)
        self._done_bytes = 0.0

    def tell(self, number: int, part: float) -> None:
        """Notes that the share ``part`` (0 to 1) of file ``number`` has been read, and reports the total progress."""
        if self._progress is None:
            return
        self._done_bytes += self._bytes[number] * (part - self._done[number])
        self._done[number] = part
        self._progress(min(self._done_bytes / self._whole_bytes, 1.0))


def _engine(
    files: Sequence[str], jobs: int | None, engine: str | None, on_progress: ProgressCallback
) -> Engine:
    if engine is not None:
        from ddpdoctor.trace.clusters import open_engine

        return open_engine(engine, jobs)
    # A container may use fewer processors than the machine has.
    is_known = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1
    workers = min(jobs or processors, len(files))
    # Archives are always read in other processes, because a malicious Parquet file can crash the process that reads it.
    saves_bytes = sum(_sizes(files)) * (1 - 1 / workers) if workers > 1 else 0.0
    if any(map(is_archive, files)) or saves_bytes > _WORTH_PROCESSES_BYTES:
        return partial(read_in_processes, workers=workers, on_progress=on_progress)
    return partial(read_serially, on_progress=on_progress)


def _worth_keeping(files: Sequence[str]) -> bool:
    """Whether the cache saves time; always for URLs."""
    if any(map(is_url, files)):
        return True
    sizes = zip(files, _sizes(files), strict=True)
    text_bytes = sum(
        size * (_COMPRESSION_RATIO if file.endswith((".gz", ".zst")) else 1) for file, size in sizes
    )
    return text_bytes > _WORTH_KEEPING_BYTES


def _sizes(files: Sequence[str]) -> list[int]:
    """[files] compressed bytes of each. Of a file with several ranks, each rank has an equal share."""
    places = [file_of(file) for file in files]
    ranks = Counter(places)
    return [_size(place) // ranks[place] for place in places]


def _size(place: str) -> int:
    if is_url(place):
        return _UNKNOWN_BYTES
    try:
        return Path(place).stat().st_size
    except OSError:
        return 0


_MAX_GAP_NS = 600 * 10**9
"""Traces with a longer gap between them are of different recordings. The clocks of a job's hosts, and the times at which its ranks open
their windows, differ by less."""

Span = tuple[int, int]
"""Begin and end, ns."""


def select_job(traces: list[RankTrace], chosen: int | None = None) -> tuple[list[RankTrace], list[str]]:
    """The ``traces`` of one recording of one job, sorted by rank; and notes, such as on the traces that are left out.

    Of several recordings, selects number ``chosen`` in descending order of completeness, by default the first. Raises
    :class:`UnusableInput` if the traces are of different jobs and none is chosen, or if there is no number ``chosen``.
    """
    notes: list[str] = []
    groups = sorted(_jobs(traces), key=_completeness, reverse=True)
    if chosen is None and _are_different_jobs(groups):
        raise UnusableInput(
            f"The files come from different jobs: {_listed(groups)}. Choose one with --job N, or name its files."
        )
    if chosen is not None and not 1 <= chosen <= len(groups):
        raise UnusableInput(f"There is no job {chosen}; the files are of {_listed(groups)}.")
    kept = groups[(chosen or 1) - 1]
    others = [t for group in groups if group is not kept for t in group]
    if others:
        notes.append(
            "The files come from more than one job or recording (they differ in world size or backend, "
            f"or lie far apart in time): the {len(kept)} that belong together are used, {len(others)} left out, "
            f"such as {others[0].meta.source}. To analyze those, name their files or choose with --job N."
        )
    unique = _one_per_rank(_numbered(kept, notes), notes)
    return sorted(unique, key=lambda t: -1 if t.meta.rank is None else t.meta.rank), notes


def _jobs(traces: list[RankTrace]) -> list[list[RankTrace]]:
    """The traces in groups, each of one recording: same world size, backend and kind of clock, and close to each other in time."""
    kinds: dict[tuple[int | None, str | None, str], list[RankTrace]] = defaultdict(list)
    for trace in traces:
        kinds[trace.meta.world_size, trace.meta.backend, trace.meta.clock].append(trace)
    return [
        group
        for (_, _, clock), members in kinds.items()
        for group in ([members] if clock == "relative" else _cluster_by_time(members))
    ]


def _cluster_by_time(traces: Iterable[RankTrace]) -> list[list[RankTrace]]:
    groups: list[list[RankTrace]] = []
    end_ns = 0
    for trace in sorted(traces, key=lambda trace: trace.span_ns):
        start, end = trace.span_ns
        if not groups or start > end_ns + _MAX_GAP_NS:
            groups.append([])
            end_ns = end
        groups[-1].append(trace)
        end_ns = max(end_ns, end)
    return groups


def _are_different_jobs(groups: list[list[RankTrace]]) -> bool:
    """Whether the groups differ in world size or backend. An unknown world size or backend matches any."""
    sizes = {group[0].meta.world_size for group in groups} - {None}
    backends = {group[0].meta.backend for group in groups} - {None}
    return len(sizes) > 1 or len(backends) > 1


def _listed(groups: list[list[RankTrace]]) -> str:
    described = []
    for number, group in enumerate(groups, 1):
        meta = group[0].meta
        size = "unknown size" if meta.world_size is None else f"{meta.world_size} rank(s)"
        over = f" over {meta.backend}" if meta.backend else ""
        described.append(f"({number}) {size}{over}, {len(group)} file(s) such as {meta.source}")
    return "; ".join(described)


def _completeness(group: list[RankTrace]) -> tuple[int, int, int]:
    ranks = {t.meta.rank if t.meta.rank is not None else t.meta.source for t in group}
    return len(ranks), sum(t.size for t in group), max(t.span_ns[1] for t in group)


def _numbered(traces: list[RankTrace], notes: list[str]) -> list[RankTrace]:
    """The traces, each with a rank (a single trace may have none). If no rank is known, traces are numbered in the order of their file
    names; otherwise those without a rank are skipped."""
    nameless = [t for t in traces if t.meta.rank is None]
    if not nameless or len(traces) == 1:
        return traces
    if len(nameless) == len(traces):
        files = {file_of(t.meta.source) for t in traces}
        order = "the processes in the file" if len(files) == 1 else "the file names"
        notes.append(f"No trace names its rank: ranks are numbered in the order of {order}.")
        ordered = sorted(traces, key=lambda t: t.meta.source)
        return [replace(t, meta=replace(t.meta, rank=i)) for i, t in enumerate(ordered)]
    notes.append(
        f"{len(nameless)} file(s) do not name their rank and were skipped, such as {nameless[0].meta.source}."
    )
    return [t for t in traces if t.meta.rank is not None]


def _one_per_rank(traces: list[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Keeps one trace per rank: the one that overlaps in time with traces of most other ranks; of several such traces, the latest, then the
    largest."""
    by_rank: dict[int | None, list[RankTrace]] = defaultdict(list)
    for trace in traces:
        by_rank[trace.meta.rank].append(trace)
    if len(by_rank) == len(traces):
        return traces
    spans = {rank: [t.span_ns for t in ts] for rank, ts in by_rank.items()}
    chosen = []
    for rank, candidates in by_rank.items():
        if len(candidates) == 1:
            chosen.extend(candidates)
            continue
        others = [there for other, there in spans.items() if other != rank]
        best = max(candidates, key=lambda t: (_overlapping_ranks(t.span_ns, others), t.span_ns[1], t.size))
        chosen.append(best)
        notes.append(
            f"Rank {rank} has {len(candidates)} traces: {best.meta.source} is used, "
            f"the latest{' that the ranks have in common' if others else ''}."
        )
    return chosen


def _overlapping_ranks(own: Span, others: list[list[Span]]) -> int:
    return sum(any(start <= own[1] and end >= own[0] for start, end in spans) for spans in others)


_HOST_CATEGORIES = ("cpu_op", "python_function", "user_annotation")
"""Categories of events that the profiler records on the host. Calls that launch work are recorded with the device's events."""
_MIN_OPERATOR_SHARE = 0.5
"""Late device events are removed if at least this share of them have names that also occur among events launched by operators."""


def within_host_recording(trace: RankTrace) -> RankTrace:
    """``trace`` without runtime calls after the end of the host's recording, and without the device events that they launched.

    A profiler may go on recording launches and kernels for dozens of steps after it has stopped recording operators. These late events
    belong to no step of the window. But late events may also be normal: CUDA graphs and extensions launch work without operators. So late
    events are removed only if most of their device events have names that operators launched earlier in the trace. The trace is unchanged
    if it has no operators and no Python functions (a trace of kernels), or no late launches.
    """
    if not trace.category_mask("cpu_op", "python_function").any():
        return trace
    over_ns = int(trace.end_ns[trace.category_mask(*_HOST_CATEGORIES)].max())
    calls = trace.category_mask(*RUNTIME_CALLS) & (trace.start_ns > over_ns)
    later = np.isin(trace.correlation, trace.correlation[calls & (trace.correlation >= 0)]) & ~calls
    if not later.any():
        return trace
    launched = np.isin(
        trace.correlation, trace.correlation[(trace.external_id > 0) & (trace.correlation >= 0)]
    )
    of_operators = np.isin(trace.name[later], trace.name[launched & ~later])
    return trace.among(~(calls | later)) if of_operators.mean() >= _MIN_OPERATOR_SHARE else trace
