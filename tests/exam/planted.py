"""The ground truth of a case: kind, ranks, lines and price of each planted fault."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

FILE_NAME = "truth.json"


@dataclasses.dataclass(frozen=True)
class When:
    """The steps of the run in which planted work takes time, as recorded by the job itself.

    ``how``: "always", "every n-th", "since", "until", "growing", "once" or "twice". ``work``: the kind of work, as in ``run.*.kind``.
    ``steps``: first and last step with it, or each step with a pause. ``total``: number of steps of the run. ``seconds``: mean over the
    ranks that do it, and sum over the steps of the maximum over these ranks.
    """

    how: str
    work: str
    steps: tuple[int, ...]
    total: int
    seconds: tuple[float, float]
    every: int | None = None


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault. ``ranks``: the ranks that have it (None: all ranks equally). ``lines``: (file, line) of its work.

    ``price_ms``: what its removal saves while other faults remain. ``alone_ms``: its cost without the other fault.
    ``may_be_information``: it occurs once, so that it may be reported with severity info. ``error_ms``: standard error of ``price_ms``;
    0 in simulated jobs, whose costs are exact.
    """

    kind: str
    rules: tuple[str, ...]
    ranks: tuple[int, ...] | None
    price_ms: float
    lines: tuple[tuple[str, int], ...] = ()
    may_be_information: bool = False
    alone_ms: float | None = None
    when: When | None = None
    error_ms: float = 0.0

    @property
    def between_ms(self) -> tuple[float, float]:
        """(Lowest, highest) correct cost."""
        alone_ms = self.price_ms if self.alone_ms is None else self.alone_ms
        return min(self.price_ms, alone_ms), max(self.price_ms, alone_ms)


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the exam. ``tolerated``: rules that apply to the program even without its faults.

    ``joint_ms``: what the removal of all faults saves, if there are several. ``steps_told``: whether the recording shows where steps
    begin; otherwise prices are compared as shares of the time.
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
    """Name of the trap, a healthy program that looks faulty; empty for other cases."""

    def write(self, folder: Path) -> None:
        (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(self), indent=1))


def read(folder: Path) -> Case:
    """The case that ``Case.write`` wrote to ``folder``."""
    return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=Case)
