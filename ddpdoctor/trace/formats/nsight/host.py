"""What the threads of one process asked of CUDA and of the operating system."""

from __future__ import annotations

import re

import numpy as np

from .build import Rows, Table
from .database import MISSING, Database
from .device import lengths
from .tables import OS_CALLS, RUNTIME

_VERSION = re.compile(r"_v\d{4,5}$")
"""Nsight Systems adds the version in which CUDA got a function: cudaLaunchKernel_v7000."""
_DRIVER = re.compile(r"cu[A-Z]")
_CATEGORIES = ("cuda_runtime", "cuda_driver", "os_runtime")


def add_calls(database: Database, where: str, values: tuple[int, ...], table: Table) -> None:
    """Appends the calls of the process to ``table``. Raises :class:`DamagedError`."""
    known: dict[int, tuple[str, str]] = {}
    for name in (RUNTIME, OS_CALLS):
        own = where if not where or database.has(name, "globalTid") else ""
        for batch in database.batches(
            name, ("start", "end", "globalTid", "correlationId", "nameId"), (), (), own, values if own else ()
        ):
            numbers = batch["nameId"].tolist()
            new = [number for number in set(numbers) if number not in known and number != MISSING]
            for number, text in database.strings(new).items():
                known[number] = _call(text, name)
            told = [
                known.get(number, ("", _CATEGORIES[0] if name == RUNTIME else _CATEGORIES[2]))
                for number in numbers
            ]
            table.add(
                Rows(
                    category=[category for _, category in told],
                    name=[text for text, _ in told],
                    start=batch["start"],
                    duration=lengths(batch),
                    thread=batch["globalTid"],
                    correlation=np.where(batch["correlationId"] > 0, batch["correlationId"], -1)
                    if name == RUNTIME
                    else None,
                )
            )


def _call(text: str, table: str) -> tuple[str, str]:
    """(Name as Kineto writes it, category) of a call."""
    if table == OS_CALLS:
        return text, _CATEGORIES[2]
    name = _VERSION.sub("", text)
    return name, _CATEGORIES[1] if _DRIVER.match(name) else _CATEGORIES[0]
