"""All ranks of a job: read in parallel, numbered, duplicates and strangers left out."""

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
from ddpdoctor.trace.columns import RankTrace, Shared, is_archive
from ddpdoctor.trace.engines import Engine, Result, Task, Told, in_processes, load_here, open_engine
from ddpdoctor.trace.formats import file_of
from ddpdoctor.trace.sources import is_url, shown

from .select import one_job

_WORTH_PROCESSES_BYTES = 5 << 20
"""Compressed size that other processes must take off this one's hands: about 0.8 s of reading, where a process takes 0.35 s to
start, and its columns some to travel."""
_UNKNOWN_BYTES = 8 << 20
"""What a file is taken to have that comes by a network."""
_WORTH_KEEPING_BYTES = 16 << 20
"""JSON of all files from which on their columns are kept: less is read anew in the time that opening kept columns takes."""
_PACKED = 12
"""Times its compressed size that a profiler's JSON has, about."""


class LoadedTraces(msgspec.Struct):
    """The traces of one job, sorted by rank; what was noticed; and the files that could not be used, with the reason."""

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
    """Reads ``files`` and keeps one trace per rank of one job.

    ``jobs``, ``ranks``, ``cache``, ``engine``, ``progress``: see :func:`read_traces`. ``job``: which of several
    jobs, as the refusal numbers them. Raises :class:`UnusableInput` where no file can be used, or where they are
    of several jobs and none is chosen.
    """
    loaded: dict[int, RankTrace] = {}
    failed: dict[int, str] = {}
    shared = Shared()
    read = read_traces(files, jobs=jobs, progress=progress, ranks=ranks, cache=cache, engine=engine)
    for number, trace, reason in read:
        if trace is None:
            failed[number] = reason
        else:
            loaded[number] = shared.of(trace) if len(files) > 1 else trace
    if not loaded:
        raise UnusableInput(_nothing(list(files), [failed[i] for i in sorted(failed)]))
    traces, notes = one_job([loaded[i] for i in sorted(loaded)], job)
    notes[:0] = _said_once(traces)
    return LoadedTraces(traces, notes, [(files[i], failed[i]) for i in sorted(failed)])


def _said_once(traces: Sequence[RankTrace]) -> list[str]:
    """Their notes; what several say alike, once: ``rank0.sqlite and 2 more (ranks 1 and 2): no NVTX range ...``."""
    sources: dict[str, list[RankTrace]] = {}
    for trace in traces:
        for note in trace.meta.notes:
            same = note.removeprefix(trace.meta.source)
            sources.setdefault(same if same.startswith(":") else note, []).append(trace)
    return [_whose(said) + note if note.startswith(":") else note for note, said in sources.items()]


def _whose(traces: Sequence[RankTrace]) -> str:
    first, *others = traces
    if not others:
        return first.meta.source
    known = [trace.meta.rank for trace in others if trace.meta.rank is not None and trace.meta.rank_from]
    ranks = f" ({ranks_in_words(known)})" if len(known) == len(others) else ""
    return f"{first.meta.source} and {len(others)} more{ranks}"


def _without_secrets(file: str, trace: RankTrace | None, reason: str) -> tuple[RankTrace | None, str]:
    """The same with what is secret in the URL masked wherever it is named."""
    public = shown(file)
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
    """(position in ``files``, trace or None, why there is none) of each file, as they are done.

    ``jobs``: processes at most (default: one a processor). ``progress`` is told which part of the files' bytes is read, 0 to 1,
    after each file and within large ones. ``ranks``: rank by file, where the caller knows it. ``cache``: use and fill the cache of parsed
    columns, where reading takes longer than that. ``engine``: where files are read, see :func:`open_engine`
    (default: processes of this machine).
    """
    known = ranks or {}
    keep = cache and _worth_keeping(files)
    work = [Task(i, file, known.get(file), keep) for i, file in enumerate(files)]
    parts = _Parts(files, progress)
    for number, trace, reason in _engine(files, jobs, engine, parts.tell)(work):
        yield (number, *_without_secrets(files[number], trace, reason))
        parts.tell(number, 1.0)


class _Parts:
    """How far the reading of all files is, by their bytes."""

    def __init__(self, files: Sequence[str], progress: Callable[[float], None] | None) -> None:
        self._progress = progress
        self._bytes = [max(size, 1) for size in _sizes(files)] if progress is not None else []
        self._whole_bytes = sum(self._bytes)
        self._done = [0.0] * len(self._bytes)
        self._done_bytes = 0.0

    def tell(self, number: int, part: float) -> None:
        """So much is done of the file of this number."""
        if self._progress is None:
            return
        self._done_bytes += self._bytes[number] * (part - self._done[number])
        self._done[number] = part
        self._progress(min(self._done_bytes / self._whole_bytes, 1.0))


def _engine(files: Sequence[str], jobs: int | None, engine: str | None, told: Told) -> Engine:
    if engine is not None:
        return open_engine(engine, jobs)
    workers = min(jobs or _processors(), len(files))
    # What reads Parquet ends its process on some files that were made to harm.
    if not any(map(is_archive, files)) and not _worth_it(files, workers):
        return partial(load_here, told=told)
    return in_processes(workers, told)


def _processors() -> int:
    """Processors this process may use: in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _worth_it(files: Sequence[str], workers: int) -> bool:
    if workers < 2:
        return False
    return sum(_sizes(files)) * (1 - 1 / workers) > _WORTH_PROCESSES_BYTES


def _worth_keeping(files: Sequence[str]) -> bool:
    """A file that comes by a network is."""
    if any(map(is_url, files)):
        return True
    sizes = zip(files, _sizes(files), strict=True)
    text_bytes = sum(size * (_PACKED if file.endswith((".gz", ".zst")) else 1) for file, size in sizes)
    return text_bytes > _WORTH_KEEPING_BYTES


def _sizes(files: Sequence[str]) -> list[int]:
    """Bytes of each, as they lie there; of a rank in a file of several, its share of the file."""
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


def _nothing(files: list[str], reasons: list[str]) -> str:
    if not files:
        return "No profiler trace to read."
    if len(reasons) == 1:
        return reasons[0]
    return f"None of the {len(files)} files can be used; the first: {reasons[0]}"
