"""Reads one process of an Nsight Systems export into one rank's columns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        return _Reading(path, file, database, processes, number or 0).trace(rank)


class _Reading:
    """The reading of one process."""

    def __init__(
        self, path: str, file: str, database: Database, processes: tuple[Process, ...], number: int
    ) -> None:
        self._path, self._file, self._database = path, file, database
        self._number, self._count = number, len(processes)
        self._process = processes[number]
        self._table = EventTable()
        self._errors: list[str] = []

    def trace(self, rank: int | None) -> RankTrace:
        """The trace of the process. Raises :class:`UnusableInput` if it has no readable event."""
        ranges = self._fill()
        if not self._table.rows:
            why = self._errors[0] if self._errors else "holds no event with a begin and an end"
            raise UnusableInput(f"{self._path} {why}.")
        has_steps = self._add_steps(ranges)
        communicators = [call.payload for call in ranges.nccl_calls if RANKS in call.payload]
        metadata = ExportMetadata(self._database)
        base_ns, clock = metadata.clock(self._table.earliest_ns() or 0)
        trace = self._table.finish(self._meta(metadata, clock, rank, communicators, has_steps), base_ns)
        return with_collectives(trace, ranges.nccl_calls, communicators, self._table.threads, base_ns)

    def _fill(self) -> ProcessRanges:
        """Reads all tables into columns; of a damaged table, the rows before the damage."""
        self._database.process = self._process.key
        ranges = ProcessRanges()
        self._database.track_progress(sorted(EXPORT_TABLES))
        readings: tuple[Callable[[], None], ...] = (
            lambda: add_device_work(self._database, self._table),
            lambda: add_calls(self._database, self._table),
            lambda: read_ranges(self._database, self._table, ranges),
        )
        for reading in readings:
            try:
                reading()
            except DamagedError as error:
                self._errors.append(str(error))
        return ranges

    def _add_steps(self, ranges: ProcessRanges) -> bool:
        """Whether the trace has step markers: known ones, or ones inferred from other ranges, which are added."""
        if has_step_markers(ranges.annotations):
            return True
        steps = infer_steps(ranges.annotations)
        if steps:
            start, end, thread = np.array([mark[1:4] for _, mark in steps], np.int64).T
            names = [f"ProfilerStep#{number}" for number, _ in steps]
            self._table.add(ANNOTATION, names, start, end - start, thread=thread)
        return bool(steps)

    def _meta(
        self,
        metadata: ExportMetadata,
        clock: str,
        rank: int | None,
        communicators: list[dict[str, int]],
        has_steps: bool,
    ) -> TraceMeta:
        named, rank_from, world_size = metadata.rank_identity(
            self._file, self._number, self._count, communicators
        )
        return TraceMeta(
            source=self._path,
            rank=named if rank is None else rank,
            rank_from=rank_from if rank is None else "run directory",
            world_size=world_size,
            backend="nccl" if self._process.communicates and self._process.devices else None,
            host=metadata.host,
            devices=metadata.devices,
            clock=clock,
            notes=tuple(self._notes(has_steps)),
        )

    def _notes(self, has_steps: bool) -> Iterator[str]:
        for why in dict.fromkeys(self._errors):
            yield f"{self._path} {why}: what was read before is used, {self._table.rows} events in total."
        if self._table.rows_without_time:
            yield f"{self._path}: {self._table.rows_without_time} event(s) without a usable time were skipped."
        if not has_steps:
            yield (
                f'{self._path}: no NVTX range marks the steps. Push a range such as "step 12" around each, or train under '
                "torch.autograd.profiler.emit_nvtx(), which marks each optimizer.step()."
            )
        if self._database.first_rows(GRAPHS, "start", most=1):
            yield (
                f"{self._path}: CUDA graphs were recorded as wholes, and what runs in them, including collectives, is "
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
"""Names of ranges around a whole step, Lightning's among them."""
_NO_STEP = re.compile(r"micro|valid|val_|eval|test|optimizer|lr_|sched", re.IGNORECASE)
"""Names of ranges that are part of a step or outside of training steps."""
_MAX_NAME = 200
_MIN_STEPS = 2
_Row = tuple[int, NvtxRange]
"""(number of the step, its range)."""


def has_step_markers(ranges: Sequence[NvtxRange]) -> bool:
    """Whether the ranges include known step or optimizer annotations."""
    return any(
        classify.step_number(name) is not None or classify.is_optimizer_step(name)
        for name in {one.name for one in ranges}
    )


def infer_steps(ranges: Sequence[NvtxRange]) -> list[_Row]:
    """Steps inferred from the names of ``ranges``; [] if no name repeats as steps do."""
    numbered: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    whole: dict[tuple[int, str], list[_Row]] = defaultdict(list)
    for one in ranges:
        if len(one.name) > _MAX_NAME or _NO_STEP.search(one.name):
            continue
        if match := _NUMBERED.match(one.name):
            numbered[one.thread, match["what"]].append((int(match["number"]), one))
        elif _WHOLE.match(one.name):
            whole[one.thread, one.name].append((0, one))
    counted = [rows for rows in _following(numbered) if all(a < b for (a, _), (b, _) in pairwise(rows))]
    unnumbered = [[(place, one) for place, (_, one) in enumerate(rows)] for rows in _following(whole)]
    return max(
        counted or unnumbered, key=lambda rows: sum(one.end - one.start for _, one in rows), default=[]
    )


def _following(ranges: Mapping[tuple[int, str], list[_Row]]) -> Iterator[list[_Row]]:
    """Yields the ranges of each name and thread, sorted by start, if there are at least ``_MIN_STEPS`` and they are disjoint."""
    for rows in ranges.values():
        rows.sort(key=lambda row: row[1].start)
        if len(rows) >= _MIN_STEPS and all(a.end <= b.start for (_, a), (_, b) in pairwise(rows)):
            yield rows
