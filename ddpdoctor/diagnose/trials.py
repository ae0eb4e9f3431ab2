"""The result file of ``ddpdoctor try``, schema ``ddpdoctor.trials/1``: types, reading, writing and validation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import read_bounded
from ddpdoctor.written import TRIALS, write_file

TRIALS_SCHEMA = "ddpdoctor.trials/1"
TRIALS_FILE = "trials.json"
VERDICTS = ("faster", "same", "slower", "failed", "not applied")
_MAX_BYTES = 16 << 20
MAX_VARIANTS, MAX_SETTINGS = 200, 64
_MAX_LIST = 10_000
"""Most entries of a list."""
_MAX_NUMBER = 10**18

Text = Annotated[str, Meta(max_length=4000)]
Texts = Annotated[list[Text], Meta(max_length=_MAX_LIST)]
Words = Annotated[list[Annotated[str, Meta(max_length=128 << 10)]], Meta(max_length=_MAX_LIST)]
"""A command; the longest word is Linux's limit."""
Number = Annotated[float, Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
Time = Annotated[float, Meta(ge=0, le=_MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0, le=_MAX_NUMBER)]
Interval = Annotated[list[Number], Meta(min_length=2, max_length=2)]
"""[low, high]."""
Setting = bool | Annotated[int, Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)] | Number | Text


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The unchanged job."""

    median_ms: Time | None
    """Step time; None if no trial could be measured."""
    interval_ms: Interval | None = None
    """95 %; None with one trial."""
    steps: Count = 0
    """Measured steps, without warm-up."""
    trials: Count = 0
    failed: Texts = []
    """Reasons of failed trials."""


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the model with the baseline's after the same number of steps."""

    same_bits: bool | None = None
    """Whether all parameters are bitwise equal; None if two runs of the baseline differ too, or it was not recorded."""
    norm_differs: Number | None = None
    """Difference of the parameters' norms relative to the baseline's."""
    losses: Annotated[
        list[Annotated[list[Number | None], Meta(max_length=2)]], Meta(max_length=_MAX_LIST)
    ] = []
    """[baseline, variant] of rank 0 for each step."""
    says: Text = ""
    unexpected: bool = False
    """Whether the model differs by more than the setting is documented to cause."""


class Variant(msgspec.Struct, frozen=True, kw_only=True, rename={"settings": "set"}):
    """The job with changed settings."""

    settings: Annotated[dict[Text, Setting], Meta(max_length=MAX_SETTINGS)]
    finding: Text | None = None
    """Rule of the finding that suggests it."""
    bound: bool = False
    """Whether it simulates a job without the cause of the finding; a job cannot train with these settings."""
    expected_ms: Time | None = None
    """Step time that the diagnosis predicts, scaled to the baseline measured here."""
    expected_range_ms: Interval | None = None
    median_ms: Time | None = None
    """Step time with the change, relative to the baseline over all trials."""
    interval_ms: Interval | None = None
    baseline_mean_ms: Time | None = None
    """Mean step of the baseline, if this change is compared by means because its cause occurs in some steps only. ``median_ms`` is
    then a mean too."""
    change: Annotated[float, Meta(gt=-1, le=_MAX_NUMBER)] | None = None
    """Step time divided by the baseline's, minus 1: negative is faster."""
    change_interval: Interval | None = None
    trials_ms: Annotated[list[Time], Meta(max_length=_MAX_LIST)] = []
    """Step time of each trial, not corrected by the baseline's."""
    steps: Count = 0
    trials: Count = 0
    verdict: str
    why: Text = ""
    """Why it failed, was not applied, or gave no result."""
    results: Text = ""
    """How the setting may change the numbers that the job computes."""
    parity: Parity | None = None

    @property
    def prediction_held(self) -> bool | None:
        """Whether the intervals of the predicted and the measured step time overlap; None if either is unknown."""
        if self.expected_ms is None or self.interval_ms is None:
            return None
        low, high = self.expected_range_ms or [self.expected_ms, self.expected_ms]
        return low <= self.interval_ms[1] and high >= self.interval_ms[0]


class TrialsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of all variants of an experiment."""

    schema: str = TRIALS_SCHEMA
    tool_version: Text = ""
    created_ns: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None
    command: Words = []
    """Masked."""
    steps_each: Count = 0
    """Steps per trial, including warm-up."""
    baseline: Baseline
    variants: Annotated[list[Variant], Meta(max_length=MAX_VARIANTS)] = []
    notes: Texts = []

    def best(self) -> Variant | None:
        """The fastest variant that is faster and can train; None if there is none."""
        faster = [each for each in self.variants if each.verdict == "faster" and not each.bound]
        return min(
            faster, key=lambda each: each.change if each.change is not None else math.inf, default=None
        )


def as_json(report: TrialsReport) -> bytes:
    """The content of the result file."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def write_trials(report: TrialsReport, path: Path) -> None:
    """Writes the result file atomically. Raises DdpDoctorError if it cannot be written, or another file is there."""
    write_file(path, as_json(report), TRIALS)


def read_trials(path: Path) -> TrialsReport:
    """Reads a result file. Raises UnusableInput if it is invalid, OSError if it cannot be read."""
    try:
        report = msgspec.json.decode(read_bounded(str(path), _MAX_BYTES), type=TrialsReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableInput(f"{path} holds no trials that can be read ({error}).") from None
    if report.schema != TRIALS_SCHEMA:
        raise UnusableInput(
            f"{path} is of schema {report.schema[:80]}, this ddpdoctor reads {TRIALS_SCHEMA}."
        )
    fault = validation_error(report)
    if fault is not None:
        raise UnusableInput(f"{path} holds no trials that can be: {fault}.")
    return report


def validation_error(report: TrialsReport) -> str | None:
    """Description of the first value in ``report`` that its type allows but no experiment produces; None if there is none."""
    for variant in report.variants:
        if variant.verdict not in VERDICTS:
            return f"a verdict that is none of {', '.join(VERDICTS)}"
    of_variants = (
        (each.interval_ms, each.expected_range_ms, each.change_interval) for each in report.variants
    )
    for ends in (report.baseline.interval_ms, *itertools.chain.from_iterable(of_variants)):
        if ends is not None and ends[0] > ends[1]:
            return "an interval that is none"
    return None
