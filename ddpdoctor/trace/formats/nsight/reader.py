"""Reads one process of an Nsight Systems export into one rank's columns.

If a trace has neither step annotations that :mod:`ddpdoctor.trace.classify` recognises nor optimizer annotations, which ``emit_nvtx`` adds,
steps are inferred from the script's ranges: numbered ones (``iter 12``), else unnumbered ones around each step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import classify
from ddpdoctor.trace.columns import RankTrace, TraceMeta
from ddpdoctor.trace.sources import is_url, redact_url

from .build import EventTable, NvtxRange, ProcessRanges, add_calls, add_device_work, read_ranges
from .database import ANNOTATION, EXPORT_TABLES, GRAPHS, RANKS, DamagedError, Database
from .identity import ExportMetadata, Process, ranks_in
from .nccl import with_collectives
from .recognise import is_sqlite, part_address, split


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    if is_url(path):
        raise UnusableInput(
            f"{redact_url(path)}: a database cannot be read from there: copy it to this machine first."
        )
    file, number = split(path)
    if not is_sqlite(file):
        raise UnusableInput(
            f"{file} is no SQLite database: export the report again with nsys export --type sqlite."
        )
    try:
        processes = ranks_in(file)
    except DamagedError as error:
        raise UnusableInput(f"{file} {error}: export the report again.") from None
    with Database(file) as database:
        if EXPORT_TABLES.isdisjoint(database.tables):
            raise UnusableInput(f"{file} is an SQLite database, but no export of Nsight Systems.")
        if not processes:
            raise UnusableInput(
                f"{file} holds no kernel and no NVTX range: record with nsys profile --trace=cuda,nvtx."
            )
        if number is None and len(processes) > 1:
            raise UnusableInput(
                f"{file} holds {len(processes)} ranks: name one of them, such as {part_address(file, 0, len(processes))}."
            )
        if (number or 0) >= len(processes):
            raise UnusableInput(f"{path}: the file holds {len(processes)} rank(s) only.")
        return _read_process(path, file, database, processes, number or 0, rank)


def _read_process(
    path: str, file: str, database: Database, processes: tuple[Process, ...], number: int, rank: int | None
) -> RankTrace:
    """The trace of process ``number``. Raises :class:`UnusableInput` if it has no readable event."""
    process, table, ranges = processes[number], EventTable(), ProcessRanges()
    database.process = process.key
    errors = list(_read_tables(database, table, ranges))
    if not table.rows:
        why = errors[0] if errors else "holds no event with a begin and an end"
        raise UnusableInput(f"{path} {why}.")
    has_steps = _add_steps(table, ranges)
    communicators = [call.payload for call in ranges.nccl_calls if RANKS in call.payload]
    metadata = ExportMetadata(database)
    base_ns, clock = metadata.clock(table.earliest_ns() or 0)
    named, rank_from, world_size = metadata.rank_identity(file, number, len(processes), communicators)
    meta = TraceMeta(
        source=path,
        rank=named if rank is None else rank,
        rank_from=rank_from if rank is None else "run directory",
        world_size=world_size,
        backend="nccl" if process.communicates and process.devices else None,
        host=metadata.host,
        devices=metadata.devices,
        clock=clock,
        notes=tuple(_notes(path, database, table, errors, has_steps)),
    )
    trace = table.finish(meta, base_ns)
    return with_collectives(trace, ranges.nccl_calls, communicators, table.threads, base_ns)


def _read_tables(database: Database, table: EventTable, ranges: ProcessRanges) -> Iterator[str]:
    """Reads all tables into columns. Of a damaged table the rows before the damage are read. Yields a text per damage."""
    database.track_progress(sorted(EXPORT_TABLES))
    for reading in (add_device_work, add_calls, partial(read_ranges, found=ranges)):
        try:
            reading(database, table)
        except DamagedError as error:
            yield str(error)


def _add_steps(table: EventTable, ranges: ProcessRanges) -> bool:
    """Adds step markers inferred from other ranges if there are no known ones. Returns whether the trace has step markers."""
    if has_step_markers(ranges.annotations):
        return True
    steps = infer_steps(ranges.annotations)
    if steps:
        start, end, thread = np.array([mark[1:4] for _, mark in steps], np.int64).T
        names = [f"ProfilerStep#{number}" for number, _ in steps]
        table.add(ANNOTATION, names, start, end - start, thread=thread)
    return bool(steps)


def _notes(
    path: str, database: Database, table: EventTable, errors: list[str], has_steps: bool
) -> Iterator[str]:
    for why in dict.fromkeys(errors):
        yield f"{path} {why}: what was read before is used, {table.rows} events in total."
    if table.rows_without_time:
        yield f"{path}: {table.rows_without_time} event(s) without a usable time were skipped."
    if not has_steps:
        yield (
            f'{path}: no NVTX range marks the steps. Push a range such as "step 12" around each, or train under '
            "torch.autograd.profiler.emit_nvtx(), which marks each optimizer.step()."
        )
    if database.first_rows(GRAPHS, "start", most=1):
        yield (
            f"{path}: CUDA graphs were recorded as wholes, and what runs in them, including collectives, is "
            "not shown separately: record with --cuda-graph-trace=node."
        )


_NUMBERED = re.compile(
    r"(?P<what>.*?(?<![a-z])(?:step|iter|iteration|batch)s?[\s_#:=.(\[-]*)(?P<number>\d{1,9})[\])]?\s*$",
    re.IGNORECASE | re.DOTALL,
)
_WHOLE = re.compile(
    r"(?:\[pl\]\[(?:profile|module)\])?.{0,40}(?<![a-z])(?:run_training_batch|training_step|train_step|train_batch|train_iter(?:ation)?)$"
    r"|(?:step|iter|iteration|train_loop_body)$",
    re.IGNORECASE,
)
"""Names of ranges around a whole step, including Lightning's."""
_NO_STEP = re.compile(r"micro|valid|val_|eval|test|optimizer|lr_|sched", re.IGNORECASE)
"""Names of ranges that are a part of a step or outside of training steps."""
_MAX_NAME = 200
_MIN_STEPS = 2
_Row = tuple[int, NvtxRange]
"""(Number of a step, its range)."""


def has_step_markers(ranges: Sequence[NvtxRange]) -> bool:
    """Whether the ranges include known step or optimizer annotations."""
    return any(
        classify.step_number(name) is not None or classify.is_optimizer_step(name)
        for name in {one.name for one in ranges}
    )


def infer_steps(ranges: Sequence[NvtxRange]) -> list[_Row]:
    """Steps inferred from the names of ``ranges``; [] if no ranges look like steps."""
    numbered: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    whole: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    for one in ranges:
        if len(one.name) > _MAX_NAME or _NO_STEP.search(one.name):
            continue
        if match := _NUMBERED.match(one.name):
            numbered[one.thread, match["what"]].append((int(match["number"]), one))
        elif _WHOLE.match(one.name):
            whole[one.thread, one.name].append((0, one))
    counted = [rows for rows in _disjoint_ranges(numbered) if all(a < b for (a, _), (b, _) in pairwise(rows))]
    unnumbered = [[(place, one) for place, (_, one) in enumerate(rows)] for rows in _disjoint_ranges(whole)]
    return max(
        counted or unnumbered, key=lambda rows: sum(one.end - one.start for _, one in rows), default=[]
    )


def _disjoint_ranges(ranges: Mapping[tuple[int, str], list[_Row]]) -> Iterator[list[_Row]]:
    """Yields the ranges of each thread and name, sorted by start, if there are at least ``_MIN_STEPS`` and they do not overlap."""
    for rows in ranges.values():
        rows.sort(key=lambda row: row[1].start)
        if len(rows) >= _MIN_STEPS and all(a.end <= b.start for (_, a), (_, b) in pairwise(rows)):
            yield rows
