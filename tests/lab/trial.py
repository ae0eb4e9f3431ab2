"""One case from its draw to its judgement."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from .cases import Case
from .faults import Draw, Fault
from .judging import Expected, Judgement, judge
from .planting import Plant
from .running import Job, Recorded, record, recorded_before

SMALLEST_SHARE = 0.08
"""A fault whose cost cannot be chosen, or depends on chance, and turned out below this share of the step is not counted."""


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    judgement: Judgement | None = None
    expected: Expected = field(default_factory=Expected)
    folder: Path | None = None
    step_ms: float | None = None
    truth_ms: float | None = None
    """Mean step with the fault less mean step without."""
    load: float = 0.0
    """Load average of the machine when the case ended."""
    error: str | None = None
    alike: str = ""

    @property
    def counts(self) -> bool:
        """False where nothing can be said: the job failed, or the fault turned out too small."""
        if self.judgement is None:
            return False
        fault = self.case.fault
        if fault is None or (fault.sized and not fault.by_chance):
            return True
        return bool(self.truth_ms and self.step_ms and self.truth_ms >= SMALLEST_SHARE * self.step_ms)

    def as_json(self) -> dict[str, Any]:
        judged = self.judgement.as_json() if self.judgement else None
        return {
            "case": self.case.name,
            "script": self.case.job.script,
            "ranks": self.case.job.ranks,
            "culprit": self.expected.ranks,
            "expected": self.expected.rules,
            "counts": self.counts,
            "step_ms": self.step_ms,
            "truth_ms": self.truth_ms,
            "folder": str(self.folder),
            "load": self.load,
            "error": self.error,
            "judgement": judged,
        }


class Bench:
    """Runs cases in a folder, and each job without faults once for all the cases that need it."""

    def __init__(self, folder: Path, base_ms: float | None = None, *, again: bool = False) -> None:
        """``base_ms``: the step time without faults, where it need not be measured. ``again``: judge what lies in
        the folder, and run nothing that was run before."""
        self.folder, self.base_ms, self.again = folder, base_ms, again
        self._healthy: dict[Any, Recorded] = {}
        self._lock = threading.Lock()

    def healthy(self, job: Job, plants: list[Plant], label: str) -> Recorded:
        """The job without the fault."""
        key = (job, label)
        with self._lock:
            if key not in self._healthy:
                name = f"base-{job.script}-{job.ranks}x{job.step_ms:g}ms-{job.batch}{label and '-' + label}"
                folder = self.folder / name
                self._healthy[key] = recorded_before(folder) or record(folder, job, plants, Random(str(key)))
            return self._healthy[key]

    def run(self, case: Case) -> Outcome:
        """Run and judge; a job that fails is an outcome too."""
        outcome = Outcome(case, folder=self.folder / case.name.replace("/", "-"))
        try:
            recorded = self._run(case, outcome)
            outcome.step_ms = recorded.step_ms
            outcome.judgement = judge(recorded.diagnosis, outcome.expected, recorded.script.read_text())
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.load = os.getloadavg()[0]
        return outcome

    def _run(self, case: Case, outcome: Outcome) -> Recorded:
        random = Random(case.seed)
        assert outcome.folder
        if case.trap:
            plants = [case.trap.plant(random)]
            return self._record(outcome.folder, case.job, plants, random, case.trap.neighbours)
        assert case.fault
        plants, base_ms = self.planted(case, case.fault, random)
        if case.second:
            plants += [case.second.plant(_draw(case, base_ms, 0.6, random, other=True))]
        outcome.expected = Expected(
            case.fault.right_rules(case.job.script),
            [case.rank] if case.fault.one_rank else None,
            case.second.rules if case.second else (),
            here=next((plant.here for plant in plants if plant.here), None),
            has_line=case.fault.has_line,
        )
        recorded = self._record(outcome.folder, case.job, plants, random)
        outcome.truth_ms = recorded.step_ms - base_ms
        return recorded

    def _record(
        self, folder: Path, job: Job, plants: list[Plant], random: Random, neighbours: int = 0
    ) -> Recorded:
        before = recorded_before(folder) if self.again else None
        return before or record(folder, job, plants, random, neighbours)

    @staticmethod
    def guess(case: Case, random: Random) -> Draw:
        """What a fault looks like where the step time is not measured first."""
        return _draw(case, case.job.step_ms + 5, 1.0, random)

    def planted(self, case: Case, fault: Fault, random: Random) -> tuple[list[Plant], float]:
        """The fault at its size, and the step time without it."""
        guess = self.guess(case, random)
        before = [fault.base(guess)] if fault.base else []
        label = f"{fault.name}-{case.size}" if fault.base else ""
        base_ms = self.base_ms or self.healthy(case.job, before, label).step_ms
        # What the job without the fault has as well must be the same in both.
        size = guess if fault.base else _draw(case, base_ms, 1.0, random)
        plants = [Plant(arguments=before[0].arguments)] if before else []
        return [*plants, fault.plant(size)], base_ms


def _draw(case: Case, base_ms: float, part: float, random: Random, *, other: bool = False) -> Draw:
    cost_ms = part * base_ms * case.share / (1 - case.share)
    rank = (case.rank + 1) % case.job.ranks if other else case.rank
    return Draw(cost_ms, base_ms, rank, case.job.batch, case.job.steps, random)
