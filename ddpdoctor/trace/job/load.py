"""Reads the traces of a job in parallel and keeps one per rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import ranks_in_words
from ddpdoctor.trace.columns import InternPool, RankTrace, is_archive
from ddpdoctor.trace.engines import (
    Engine,
    ProgressCallback,
    Result,
    Task,
    in_processes,
    keep_freed_memory,
    open_engine,
    read_serially,
)
from ddpdoctor.trace.formats import file_of
from ddpdoctor.trace.sources import is_url, redact_url

from .select import select_job, within_host_recording

_WORTH_PROCESSES_BYTES = 5 << 20
"""Least compressed size that worker processes must read for this one to start them: about 0.8 s of reading, while a process
takes 0.35 s to start plus the time to send its columns."""
_UNKNOWN_BYTES = 8 << 20
"""Assumed size of a file at a URL."""
_WORTH_KEEPING_BYTES = 16 << 20
"""Least size of all files' JSON for the cache: less is parsed as fast as cached columns are opened."""
_COMPRESSION_RATIO = 12
"""Approximate ratio of a trace's JSON to its compressed size."""


class LoadedTraces(msgspec.Struct):
    """The traces of one job, sorted by rank; notes; and the files that could not be read, with the reason."""

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
    """Reads ``files`` and keeps one trace per rank of one job, without what was launched after the recording of its host had ended.

    ``jobs``, ``ranks``, ``cache``, ``engine``, ``progress``: see :func:`read_traces`. ``job``: number of the job to select, as
    the error message lists them. Raises :class:`UnusableInput` if no file can be read, or if the traces are of several jobs
    and none is selected.
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
        raise UnusableInput(_no_usable_file(list(files), [failed[i] for i in sorted(failed)]))
    traces, notes = select_job([loaded[i] for i in sorted(loaded)], job)
    notes[:0] = _merged_notes(traces)
    cut = [within_host_recording(trace) for trace in traces]
    return LoadedTraces(cut, notes, [(files[i], failed[i]) for i in sorted(failed)])


def _merged_notes(traces: Sequence[RankTrace]) -> list[str]:
    """The notes of ``traces``, with equal ones merged: ``rank0.sqlite and 2 more (ranks 1 and 2): no NVTX range ...``."""
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
    files = {trace.meta.source.partition("#process-")[0] for trace in traces}
    if len(files) == 1:
        return f"{'both' if len(traces) == 2 else f'all {len(traces)}'} processes of {files.pop()}"
    known = [trace.meta.rank for trace in others if trace.meta.rank is not None and trace.meta.rank_from]
    ranks = f" ({ranks_in_words(known)})" if len(known) == len(others) else ""
    return f"{first.meta.source} and {len(others)} more{ranks}"


def _redacted(file: str, trace: RankTrace | None, reason: str) -> tuple[RankTrace | None, str]:
    """The same with secrets in the URL ``file`` masked in source, notes and reason."""
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
    """Yields (index in ``files``, trace or None, reason why there is none) of each file as it is read.

    ``jobs``: most processes (default: one per processor). ``progress`` is called with the share of the files' bytes that is
    read, 0 to 1. ``ranks``: rank by file, if the caller knows it. ``cache``: use the cache of parsed columns, if the files are
    large enough. ``engine``: see :func:`open_engine` (default: processes of this machine).
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
        """Report that the share ``part``, 0 to 1, of file ``number`` is read."""
        if self._progress is None:
            return
        self._done_bytes += self._bytes[number] * (part - self._done[number])
        self._done[number] = part
        self._progress(min(self._done_bytes / self._whole_bytes, 1.0))


def _engine(
    files: Sequence[str], jobs: int | None, engine: str | None, on_progress: ProgressCallback
) -> Engine:
    if engine is not None:
        return open_engine(engine, jobs)
    workers = min(jobs or _processors(), len(files))
    # A malicious Parquet file can crash the process that reads it.
    if not any(map(is_archive, files)) and not _worth_processes(files, workers):
        return partial(read_serially, on_progress=on_progress)
    return in_processes(workers, on_progress)


def _processors() -> int:
    """Processors that this process may use; in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _worth_processes(files: Sequence[str], workers: int) -> bool:
    if workers < 2:
        return False
    return sum(_sizes(files)) * (1 - 1 / workers) > _WORTH_PROCESSES_BYTES


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
    """[files] bytes of each, compressed; for a rank in a file of several, its share of the file."""
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


def _no_usable_file(files: list[str], reasons: list[str]) -> str:
    if not files:
        return "No profiler trace to read."
    if len(reasons) == 1:
        return reasons[0]
    return f"None of the {len(files)} files can be used; the first: {reasons[0]}"
