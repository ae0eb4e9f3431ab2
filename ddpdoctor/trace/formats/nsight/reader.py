"""One process of an export → one rank's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.columns import RankTrace, TraceMeta
from ddpdoctor.trace.sources import is_url, shown

from .build import Ranges, Table, add_calls, add_device_work, read_ranges
from .database import ANNOTATION, GRAPHS, OF_EXPORTS, RANKS, DamagedError, Database
from .identity import Capture, Process, ranks_in
from .nccl import with_collectives
from .recognise import address, is_sqlite, split
from .steps import are_marked, steps_of


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    if is_url(path):
        raise UnusableInput(
            f"{shown(path)}: a database cannot be read from there: copy it to this machine first."
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
        if OF_EXPORTS.isdisjoint(database.tables):
            raise UnusableInput(f"{file} is an SQLite database, but no export of Nsight Systems.")
        if not processes:
            raise UnusableInput(
                f"{file} holds no kernel and no NVTX range: record with nsys profile --trace=cuda,nvtx."
            )
        if number is None and len(processes) > 1:
            raise UnusableInput(
                f"{file} holds {len(processes)} ranks: name one of them, such as {address(file, 0, len(processes))}."
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
        self._table = Table()
        self._broken: list[str] = []

    def trace(self, rank: int | None) -> RankTrace:
        """All that the process did. Raises :class:`UnusableInput` where nothing can be read of it."""
        ranges = self._fill()
        if not self._table.rows:
            why = self._broken[0] if self._broken else "holds no event with a begin and an end"
            raise UnusableInput(f"{self._path} {why}.")
        marked = self._mark_steps(ranges)
        made = [call.payload for call in ranges.calls if RANKS in call.payload]
        capture = Capture(self._database)
        base_ns, clock = capture.clock(self._table.earliest_ns() or 0)
        trace = self._table.finish(self._meta(capture, clock, rank, made, marked), base_ns)
        return with_collectives(trace, ranges.calls, made, self._table.threads, base_ns)

    def _fill(self) -> Ranges:
        """Reads the tables one by one; one that is damaged costs what came after in it."""
        self._database.process = self._process.key
        ranges = Ranges()
        self._database.expect(sorted(OF_EXPORTS))
        readings: tuple[Callable[[], None], ...] = (
            lambda: add_device_work(self._database, self._table),
            lambda: add_calls(self._database, self._table),
            lambda: read_ranges(self._database, self._table, ranges),
        )
        for reading in readings:
            try:
                reading()
            except DamagedError as error:
                self._broken.append(str(error))
        return ranges

    def _mark_steps(self, ranges: Ranges) -> bool:
        """Whether steps are marked, by names that are known everywhere or by those that are made so here."""
        if are_marked(ranges.annotations):
            return True
        steps = steps_of(ranges.annotations)
        if steps:
            start, end, thread = np.array([mark[1:4] for _, mark in steps], np.int64).T
            names = [f"ProfilerStep#{number}" for number, _ in steps]
            self._table.add(ANNOTATION, names, start, end - start, thread=thread)
        return bool(steps)

    def _meta(
        self, capture: Capture, clock: str, rank: int | None, made: list[dict[str, int]], marked: bool
    ) -> TraceMeta:
        named, said_by, world_size = capture.place(self._file, self._number, self._count, made)
        return TraceMeta(
            source=self._path,
            rank=named if rank is None else rank,
            rank_from=said_by if rank is None else "run directory",
            world_size=world_size,
            backend="nccl" if self._process.communicates and self._process.devices else None,
            host=capture.host,
            devices=capture.devices,
            clock=clock,
            notes=tuple(self._notes(marked)),
        )

    def _notes(self, marked: bool) -> Iterator[str]:
        for why in dict.fromkeys(self._broken):
            yield f"{self._path} {why}: what was read before is used, {self._table.rows} events in total."
        if self._table.left_out:
            yield f"{self._path}: {self._table.left_out} event(s) without a usable time were skipped."
        if not marked:
            yield (
                f"{self._path}: no NVTX range marks the steps: they are derived from the optimizer's kernels, if these stand out. "
                'Push a range such as "step 12" around each, or train under torch.autograd.profiler.emit_nvtx().'
            )
        if self._database.small(GRAPHS, "start", most=1):
            yield (
                f"{self._path}: CUDA graphs were recorded as wholes, and what runs in them, including collectives, is "
                "not shown separately: record with --cuda-graph-trace=node."
            )
