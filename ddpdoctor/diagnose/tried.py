"""What an experiment found, schema ``ddpdoctor.trials/1``: beside the run it belongs to, and where the user wants it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import read_bounded, write_whole

TRIALS_SCHEMA = "ddpdoctor.trials/1"
TRIALS_FILE = "trials.json"
VERDICTS = ("faster", "same", "slower", "failed", "not applied")
_MOST_BYTES = 16 << 20


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The job as it is."""

    median_ms: float | None
    """Step time; None where no trial of it could be measured."""
    interval_ms: list[float] | None = None
    """[low, high], 95 %; None with one trial."""
    steps: int = 0
    """Measured, warm-up left out."""
    trials: int = 0
    failed: list[str] = []
    """Why trials of it failed."""


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the model after as many steps as the baseline's."""

    same_bits: bool | None = None
    """Of all parameters; None where two runs of the baseline differ already, or it was not recorded."""
    norm_differs: float | None = None
    """Of the parameters' norms, as a share of the baseline's."""
    losses: list[list[float | None]] = []
    """[baseline, variant], of rank 0 by step."""
    says: str = ""


class Variant(msgspec.Struct, frozen=True, kw_only=True, rename={"settings": "set"}):
    """The job with something changed."""

    settings: dict[str, Any]
    finding: str | None = None
    """Rule of the finding that suggests it."""
    bound: bool = False
    """It imitates a job without the cause: nobody can train like that."""
    expected_ms: float | None = None
    """Step time that the diagnosis promises, for the step that was measured here."""
    expected_range_ms: list[float] | None = None
    median_ms: float | None = None
    interval_ms: list[float] | None = None
    change: float | None = None
    """Median over the baseline's, less 1: below 0 is faster."""
    change_interval: list[float] | None = None
    steps: int = 0
    trials: int = 0
    verdict: str
    why: str = ""
    """Why it failed, was not applied, or could not be told."""
    results: str = ""
    """What the setting may do to the numbers that the job computes."""
    parity: Parity | None = None

    @property
    def kept_promise(self) -> bool | None:
        """Whether what was expected and what was measured can both be true; None where one of them is not known."""
        if self.expected_ms is None or self.interval_ms is None:
            return None
        low, high = self.expected_range_ms or [self.expected_ms, self.expected_ms]
        return low <= self.interval_ms[1] and high >= self.interval_ms[0]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """All of an experiment."""

    schema: str = TRIALS_SCHEMA
    tool_version: str = ""
    created_ns: int | None = None
    command: list[str] = []
    """Masked."""
    steps_each: int = 0
    """Of a trial, warm-up included."""
    baseline: Baseline
    variants: list[Variant] = []
    notes: list[str] = []

    def best(self) -> Variant | None:
        """The fastest of those that are faster and with which a job can train."""
        faster = [each for each in self.variants if each.verdict == "faster" and not each.bound]
        return min(
            faster, key=lambda each: each.change if each.change is not None else math.inf, default=None
        )


def write_answer(answer: Answer, path: Path) -> None:
    """As JSON, whole or not at all. Raises OSError."""
    write_whole(str(path), msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n")


def read_answer(path: Path) -> Answer:
    """What was written. Raises UnusableInput where it is nothing of that kind, OSError where it cannot be read."""
    try:
        answer = msgspec.json.decode(read_bounded(str(path), _MOST_BYTES), type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableInput(f"{path} holds no trials that can be read ({error}).") from None
    if answer.schema != TRIALS_SCHEMA:
        raise UnusableInput(
            f"{path} is of schema {answer.schema[:80]}, this ddpdoctor reads {TRIALS_SCHEMA}."
        )
    return answer
