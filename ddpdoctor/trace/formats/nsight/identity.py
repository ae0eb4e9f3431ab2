"""Finds the processes of an export that are ranks, and their rank, world size, host and clock.

The rank comes from NCCL's description of a communicator, else from the launcher's environment variables if Nsight Systems ran once per
rank, else from torchrun's options if Nsight Systems ran torchrun, which starts a host's ranks in order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import classify
from ddpdoctor.trace.archive import rank_and_source
from ddpdoctor.trace.columns import LIMIT_NS, IntColumn
from ddpdoctor.trace.sources import MAX_RANKS

from .build import kernel_name_ids
from .database import (
    GRAPHS,
    KERNELS,
    MISSING,
    NAMES,
    NVTX,
    PROCESS_BITS,
    RANK,
    RANKS,
    RUNTIME,
    DamagedError,
    Database,
    Fields,
    is_training_range,
)

_PID_MASK = (1 << PROCESS_BITS) - 1
_MAX_PROCESSES = 1024
"""Limit of the ranks in one file; a host has at most some dozens of devices."""


class Process(msgspec.Struct, frozen=True):
    """A process that is a rank."""

    key: int | None
    """Upper bits of the global ids of the process's threads; None if the file does not distinguish processes."""
    devices: tuple[int, ...]
    """Devices that ran kernels of the process."""
    communicates: bool

    @property
    def pid(self) -> int:
        """Process id on the host; -1 if unknown."""
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
    return tuple(_in_order(found)[:_MAX_PROCESSES])


def process_of(numbers: IntColumn) -> IntColumn:
    """[numbers] process key of each global thread or process id; :data:`MISSING` stays."""
    return np.where(numbers == MISSING, MISSING, numbers >> PROCESS_BITS)


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
            raise  # otherwise the reader reports how much could be read
    if set(devices) == {MISSING}:
        yield _only_process(database, devices[MISSING], bool(communicating))
        return
    for key in devices.keys() - {MISSING}:
        yield Process(key, tuple(sorted(devices[key] - {MISSING})), key in communicating)


def _combinations(database: Database) -> Iterator[tuple[int, int, str]]:
    """Yields each combination of (process, device, kernel name) at least once."""
    for table in (KERNELS, GRAPHS):
        for batch in database.batches(table, ("globalPid", "deviceId", *NAMES)):
            columns = process_of(batch["globalPid"]), batch["deviceId"], kernel_name_ids(batch)
            keys, devices, names = np.unique(np.stack(columns), axis=1)
            yield from zip(keys.tolist(), devices.tolist(), database.strings(names), strict=True)


def _only_process(database: Database, devices: set[int], communicates: bool) -> Process:
    """The process of a file that does not state which process ran the kernels. Raises UnusableInput if several processes launched some."""
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
            key for key, text in zip(keys.tolist(), batch["text"], strict=True) if is_training_range(text)
        )
    for key in (marked or seen) - {MISSING}:
        yield Process(key, (), key in marked)


def _in_order(found: list[Process]) -> list[Process]:
    by_start = sorted(found, key=lambda process: process.pid)
    own = [process.devices for process in found]
    is_one_each = all(len(devices) == 1 for devices in own) and len(set(own)) == len(own)
    return sorted(by_start, key=lambda process: process.devices) if is_one_each else by_start


_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", ""),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Environment variables of rank and world size that torchrun, mpirun and srun set for each process."""
_TORCHRUN = re.compile(r"(?:^|[/\s])torchrun\b|torch\.distributed\.(?:run|launch)\b")
_OPTION = r"--{}(?:=|\s+)(\d{{1,7}})(?![\d:])"
_NODES, _NODE_RANK = (re.compile(_OPTION.format(name)) for name in ("nnodes", r"node[-_]rank"))
_NORMALISED_FROM_NS = 1_000_000_000_000_000_000
"""Times from here on are ns since 1970, from an export with ``--ts-normalize``."""
_MAX_TEXT = 1 << 10
_MAX_DEVICES = 1024
_DEVICE = {
    "id": "id",
    "name": "name",
    "totalMemory": "totalGlobalMem",
    "smCount": "numSms",
    "computeMajor": "computeMajor",
    "computeMinor": "computeMinor",
}
"""Column of the table of GPUs → Kineto's name of the property."""
RankIdentity = tuple[int | None, str, int | None]
"""(Rank of a process, source as in :attr:`TraceMeta.rank_from`, world size)."""


class ExportMetadata:
    """A file's metadata about its recording."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._capture = _texts(database.first_rows("META_DATA_CAPTURE", "name", "value"))
        self._system = dict(_texts(database.first_rows("TARGET_INFO_SYSTEM_ENV", "name", "value")))

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the process that Nsight Systems started."""
        own = [text for name, text in self._capture if name == "PROCESS_0:ENVIRONMENT_VARIABLE"]
        texts = [*self._system.get("DeviceEnvironment", "").split(";"), *own]
        return {name: value.strip('"') for name, _, value in (text.partition("=") for text in texts) if name}

    @cached_property
    def command(self) -> str:
        """Command line that Nsight Systems started."""
        words = ("PROCESS_0:COMMAND", "PROCESS_0:ARGUMENT")
        return " ".join(text for name, text in self._capture if name.startswith(words))

    @property
    def host(self) -> str | None:
        """Host name; None if unknown."""
        name = self._system.get("Hostname") or self.environment.get("HOSTNAME")
        return name[:_MAX_TEXT] if name else None

    @property
    def devices(self) -> tuple[dict[str, Any], ...]:
        """Properties of the machine's GPUs, with Kineto's names."""
        known = [column for column in _DEVICE if self._database.has("TARGET_INFO_GPU", column)]
        rows = self._database.first_rows("TARGET_INFO_GPU", *known, most=_MAX_DEVICES) if known else []
        return tuple(
            {
                _DEVICE[name]: value
                for name, value in zip(known, row, strict=True)
                if (
                    isinstance(value, str) if name == "name" else type(value) is int and 0 <= value < LIMIT_NS
                )
            }
            for row in rows
        )

    def clock(self, earliest_ns: int) -> tuple[int, str]:
        """(Base time to add to all times, ns; ``TraceMeta.clock``)."""
        if earliest_ns >= _NORMALISED_FROM_NS:
            return 0, "epoch"
        began = self._database.first_rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", most=1)
        if not began or not isinstance(began[0][0], int):
            return 0, "relative"
        begins = self._database.first_rows("ANALYSIS_DETAILS", "startTime", most=1)
        base_ns = began[0][0] - (begins[0][0] if begins and isinstance(begins[0][0], int) else 0)
        return (base_ns, "epoch") if 0 <= base_ns < LIMIT_NS else (0, "relative")

    def rank_identity(
        self, path: str, number: int, count: int, communicators: Sequence[Fields]
    ) -> RankIdentity:
        """Identity of process ``number`` of the ``count`` ranks in the file at ``path``. ``communicators``: those that the process
        created."""
        world = self._world(count)
        if (found := _by_nccl(communicators, world, count)) is not None:
            return found
        if count == 1:
            for variable, size in _LAUNCHERS:
                if (rank := _number(self.environment.get(variable))) is not None:
                    return rank, "distributedInfo", _number(self.environment.get(size)) or world
        if world is not None and (node := self._node(world, count)) is not None:
            return node * count + number, "distributedInfo", world
        if count > 1:  # the file's name is not specific to one rank
            return None, "distributedInfo", world
        return *rank_and_source(path, None), world

    def _world(self, count: int) -> int | None:
        """World size from torchrun's command line, if all hosts have as many ranks as this one; None if unknown."""
        if not _TORCHRUN.search(self.command):
            return None
        if "--nnodes" not in self.command:
            return count
        nodes = _NODES.search(self.command)
        return int(nodes[1]) * count if nodes else None

    def _node(self, world: int, count: int) -> int | None:
        """torchrun's node rank of this host; None if it is unknown, because the rendezvous assigned it."""
        if world == count:
            return 0
        match = _NODE_RANK.search(self.command)
        node = int(match[1]) if match else _number(self.environment.get("PET_NODE_RANK"))
        return node if node is not None and node * count < world else None


def _by_nccl(communicators: Sequence[Fields], world: int | None, count: int) -> RankIdentity | None:
    """Identity from the communicator of all ranks; None if there is none. Smaller communicators have other rank numbers."""
    found = [(one[RANKS], one[RANK]) for one in communicators if RANKS in one and RANK in one]
    size = max((ranks for ranks, _ in found), default=0)
    numbers = {rank for ranks, rank in found if ranks == size}
    if len(numbers) != 1 or size < max(count, world or 0) or size >= MAX_RANKS:
        return None
    rank = numbers.pop()
    return (rank, "distributedInfo", size) if 0 <= rank < size else None


def _number(text: str | None) -> int | None:
    number = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 8 else None
    return number if number is not None and number < MAX_RANKS else None


def _texts(rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in rows if isinstance(name, str) and isinstance(value, str)]
