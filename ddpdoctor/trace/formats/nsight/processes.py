"""Which processes of a file are ranks of the job.

Those that run kernels, and of them those that communicate, where any does; of a job on CPUs those that mark what a rank does.
A launcher, a loader's workers and whatever else ran under Nsight Systems are none. They are numbered by their devices, where each
has one of its own, else in the order in which they were started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import classify
from ddpdoctor.trace.columns import IntColumn

from .database import MISSING, DamagedError, Database
from .device import named
from .tables import GRAPHS, KERNELS, NAMES, NVTX, RUNTIME
from .texts import marks_a_rank

_PROCESS_BITS = 24
"""A thread's global number is its process's, shifted by so many bits, and its own."""
_PID_MASK = (1 << _PROCESS_BITS) - 1
_MOST_PROCESSES = 1024
"""Ranks on one host; it has at most some dozens of devices."""


class Process(msgspec.Struct, frozen=True):
    """A process that is a rank."""

    key: int | None
    """What the global numbers of its threads begin with; None where the file does not tell processes apart."""
    devices: tuple[int, ...]
    """That ran its kernels."""
    communicates: bool

    @property
    def pid(self) -> int:
        """Its number on the host; -1 unknown."""
        return -1 if self.key is None else self.key & _PID_MASK


def ranks_in(path: str) -> tuple[Process, ...]:
    """The ranks in the file, in order. Raises :class:`UnusableInput` and :class:`DamagedError`."""
    status = Path(path).stat()
    return _ranks_in(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(256)
def _ranks_in(path: str, _version: tuple[int, int, int]) -> tuple[Process, ...]:
    with Database(path) as database:
        found = list(_with_kernels(database)) or list(_on_cpus(database))
    if any(process.communicates for process in found):
        found = [process for process in found if process.communicates]
    return tuple(_in_order(found)[:_MOST_PROCESSES])


def process_of(numbers: IntColumn) -> IntColumn:
    """What the global numbers of threads or processes say of the process; :data:`MISSING` stays."""
    return np.where(numbers == MISSING, MISSING, numbers >> _PROCESS_BITS)


def _with_kernels(database: Database) -> Iterator[Process]:
    devices: dict[int, set[int]] = defaultdict(set)
    communicating: set[int] = set()
    try:
        for key, device, name in _combinations(database):
            devices[key].add(device)
            if classify.is_communication_kernel(name):
                communicating.add(key)
    except DamagedError:
        if not devices:
            raise  # else its reader tells how far it came
    if set(devices) == {MISSING}:
        yield _only_process(database, devices[MISSING], bool(communicating))
        return
    for key in devices.keys() - {MISSING}:
        yield Process(key, tuple(sorted(devices[key] - {MISSING})), key in communicating)


def _combinations(database: Database) -> Iterator[tuple[int, int, str]]:
    """(Process, device, name of a kernel) as they occur, at least once."""
    for table in (KERNELS, GRAPHS):
        for batch in database.batches(table, ("globalPid", "deviceId", *NAMES)):
            keys = process_of(batch["globalPid"])
            names = named(batch)
            told = database.strings([int(n) for n in np.unique(names) if n != MISSING])
            for key, device, name in np.unique(np.stack((keys, batch["deviceId"], names)), axis=1).T.tolist():
                yield key, device, told.get(name, "")


def _only_process(database: Database, devices: set[int], communicates: bool) -> Process:
    """Of a file that does not say which process ran its kernels: the one that launched them."""
    callers: set[int] = set()
    for batch in database.batches(RUNTIME, ("globalTid",)):
        callers.update(np.unique(process_of(batch["globalTid"])).tolist())
    if len(callers - {MISSING}) > 1:
        raise UnusableInput(
            f"{database.path} does not say which of its {len(callers)} processes ran which kernel: export the report again "
            "with a newer Nsight Systems, or record one file per rank."
        )
    return Process(None, tuple(sorted(devices - {MISSING})), communicates)


def _on_cpus(database: Database) -> Iterator[Process]:
    seen: set[int] = set()
    marked: set[int] = set()
    for batch in database.batches(NVTX, ("globalTid",), ("text",)):
        keys = process_of(batch["globalTid"])
        seen.update(np.unique(keys).tolist())
        marked.update(
            key for key, text in zip(keys.tolist(), batch["text"], strict=True) if marks_a_rank(text)
        )
    for key in (marked or seen) - {MISSING}:
        yield Process(key, (), key in marked)


def _in_order(found: list[Process]) -> list[Process]:
    by_start = sorted(found, key=lambda process: process.pid)
    own = [process.devices for process in found]
    if all(len(devices) == 1 for devices in own) and len(set(own)) == len(own):
        return sorted(by_start, key=lambda process: process.devices)
    return by_start
