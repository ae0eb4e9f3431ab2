"""What was planted in a case, as the examiner knows it: kind, ranks, lines and price of each fault."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

FILE_NAME = "truth.json"


@dataclasses.dataclass(frozen=True)
class When:
    """In which steps of the run a planted work takes time, as the job itself has noted.

    ``how``: "always", "every n-th", "since", "until", "growing", "once" or "twice". ``work``: the kind of work, as in ``run.*.kind``.
    ``steps``: the first and the last one with it; of pauses each one. ``total``: number of steps of the run. ``seconds``: of the rank that
    does it; of all ranks the mean over them, and the sum over the steps of the longest.
    """

    how: str
    work: str
    steps: tuple[int, ...]
    total: int
    seconds: tuple[float, float]
    every: int | None = None


@dataclasses.dataclass(frozen=True)
class Fault:
    """One planted fault. ``ranks`` are the culprits (None: all alike); ``lines`` are (file, line) that carry it.

    ``price_ms`` is what its removal saves, any other fault left in; ``alone_ms`` what it costs where the other is out.
    ``may_be_information``: seen once, so that nobody can know whether it comes again.
    """

    kind: str
    rules: tuple[str, ...]
    ranks: tuple[int, ...] | None
    price_ms: float
    lines: tuple[tuple[str, int], ...] = ()
    may_be_information: bool = False
    alone_ms: float | None = None
    when: When | None = None

    @property
    def between_ms(self) -> tuple[float, float]:
        """The least and the most that may rightly be called its cost."""
        alone_ms = self.price_ms if self.alone_ms is None else self.alone_ms
        return min(self.price_ms, alone_ms), max(self.price_ms, alone_ms)


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of the exam. ``tolerated`` rules are true of the program even without its faults.

    ``joint_ms`` is what the removal of all faults saves, where there are several.
    Where nothing recorded says where a step begins (``steps_told``), prices are compared as parts of the time.
    """

    seed: int
    half: str
    step_ms: float
    faults: tuple[Fault, ...]
    tolerated: tuple[str, ...] = ()
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    steps_told: bool = True
    joint_ms: float | None = None
    trap: str = ""
    """The name of a healthy program that looks faulty."""

    def write(self, folder: Path) -> None:
        (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(self), indent=1))


def read(folder: Path) -> Case:
    """The case that ``Case.write`` left in ``folder``."""
    return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=Case)
