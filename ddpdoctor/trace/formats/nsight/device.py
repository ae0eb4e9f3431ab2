"""What the devices of one process did: kernels, graphs of them, copies and fills."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from ddpdoctor.trace.columns import IntColumn

from .build import Rows, Table
from .database import MISSING, Batch, Database
from .tables import COPIES, FILLS, GRAPHS, KERNELS, NAMES

_COMMON = ("start", "end", "deviceId", "streamId", "correlationId")
_WAYS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
"""CUPTI's numbers for the ways of a copy, of managed memory too; what a file that names them says otherwise goes before."""
_MEMORY = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static",
}  # fmt: skip
"""The same for kinds of memory."""
_SIDES = {"HTOD", "DTOH", "HTOA", "ATOH", "ATOA", "ATOD", "DTOA", "DTOD", "HTOH", "PTOP"}


class Device(msgspec.Struct, frozen=True):
    """Reads what devices did for one process."""

    database: Database
    where: str
    values: tuple[int, ...]

    def add_to(self, table: Table) -> None:
        """Appends all of it. Raises :class:`DamagedError`."""
        self._kernels(table)
        self._copies(table)
        for batch in self._batches(FILLS, "bytes"):
            self._add(table, batch, "gpu_memset", ["Memset (Device)"] * len(batch["start"]))
        for batch in self._batches(GRAPHS, "graphId"):
            # Which kernels it is made of was not recorded: the device computes meanwhile, that is all.
            self._add(table, batch, "kernel", [_graph(number) for number in batch["graphId"].tolist()])

    def _batches(self, name: str, *more: str) -> Iterable[Batch]:
        own = self.where if not self.where or self.database.has(name, "globalPid") else ""
        return self.database.batches(name, (*_COMMON, *more), where=own, values=self.values if own else ())

    def _kernels(self, table: Table) -> None:
        known: dict[int, str] = {}
        for batch in self._batches(KERNELS, *NAMES):
            number = named(batch)
            new = [one for one in np.unique(number).tolist() if one not in known and one != MISSING]
            known.update(self.database.strings(new))
            self._add(table, batch, "kernel", [known.get(one, "") for one in number.tolist()])

    def _copies(self, table: Table) -> None:
        ways = _WAYS | _named_ways(self.database)
        memory = _MEMORY | dict(_labels(self.database, "ENUM_CUDA_MEM_KIND"))
        for batch in self._batches(COPIES, "bytes", "copyKind", "srcKind", "dstKind"):
            kinds = zip(*(batch[name].tolist() for name in ("copyKind", "srcKind", "dstKind")), strict=True)
            self._add(table, batch, "gpu_memcpy", [_copy(kind, ways, memory) for kind in kinds])

    def _add(self, table: Table, batch: Batch, category: str, names: list[str]) -> None:
        table.add(
            Rows(
                category=category,
                name=names,
                start=batch["start"],
                duration=lengths(batch),
                device=batch["deviceId"],
                stream=batch["streamId"],
                correlation=np.where(batch["correlationId"] > 0, batch["correlationId"], -1),
                bytes=batch.get("bytes"),
            )
        )


def named(batch: Batch) -> IntColumn:
    """The number of each kernel's name: of the first of :data:`NAMES` that its row has."""
    number: IntColumn = batch[NAMES[-1]]
    for name in reversed(NAMES[:-1]):
        number = np.where(batch[name] != MISSING, batch[name], number)
    return number


def lengths(batch: Batch) -> IntColumn:
    """How long each event took, -1 where it has no begin or no end."""
    known = (batch["start"] != MISSING) & (batch["end"] != MISSING)
    return np.where(known, batch["end"] - np.where(known, batch["start"], 0), -1)


def _graph(number: int) -> str:
    return "CUDA graph" if number == MISSING else f"CUDA graph {number}"


def _copy(kinds: tuple[int, int, int], ways: Mapping[int, str], memory: Mapping[int, str]) -> str:
    """The name that Kineto gives such a copy: ``Memcpy HtoD (Pinned -> Device)``."""
    way, source, target = kinds
    if way not in ways:
        return "Memcpy"
    if source not in memory or target not in memory:
        return f"Memcpy {ways[way]}"
    return f"Memcpy {ways[way]} ({memory[source]} -> {memory[target]})"


def _named_ways(database: Database) -> dict[int, str]:
    """The ways of copies as the file numbers them: CUDA_MEMCPY_KIND_HTOD is one."""
    ends = {
        number: name.rpartition("_")[2].upper()
        for number, name in database.small("ENUM_CUDA_MEMCPY_OPER", "id", "name")
        if isinstance(number, int) and isinstance(name, str)
    }
    return {number: f"{end[0]}to{end[3]}" for number, end in ends.items() if end in _SIDES}


def _labels(database: Database, table: str) -> Iterable[tuple[int, str]]:
    for number, label in database.small(table, "id", "label"):
        if isinstance(number, int) and isinstance(label, str):
            yield number, label
