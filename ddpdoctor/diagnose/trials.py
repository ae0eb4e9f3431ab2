"""The result file of ``ddpdoctor try``, schema ``ddpdoctor.trials/1``: types, reading, writing and validation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ddpdoctor.diagnose.jsonvalue import JsonValue
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import read_bounded
from ddpdoctor.written import TRIALS, write_file

TRIALS_SCHEMA = "ddpdoctor.trials/1"
TRIALS_FILE = "trials.json"
VERDICTS = ("faster", "same", "slower", "failed", "not applied")
_MAX_BYTES = 16 << 20
MAX_VARIANTS, MAX_SETTINGS = 200, 64
_MAX_TEXT, _MAX_WORD, _MAX_LIST = 4000, 128 << 10, 10_000
"""Longest text and longest word of the command (Linux's limit), in characters; most entries of a list."""
_MAX_NUMBER = 1e18
_MAX_NS = 1 << 62


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The unchanged job."""

    median_ms: float | None
    """Step time; None if no trial could be measured."""
    interval_ms: list[float] | None = None
    """[low, high], 95 %; None with one trial."""
    steps: int = 0
    """Measured steps, without warm-up."""
    trials: int = 0
    failed: list[str] = []
    """Reasons of failed trials."""


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the model with the baseline's after the same number of steps."""

    same_bits: bool | None = None
    """Whether all parameters are bitwise equal; None if two runs of the baseline differ too, or it was not recorded."""
    norm_differs: float | None = None
    """Difference of the parameters' norms relative to the baseline's."""
    losses: list[list[float | None]] = []
    """[baseline, variant] of rank 0 for each step."""
    says: str = ""
    unexpected: bool = False
    """Whether the model differs by more than the setting is documented to cause."""


class Variant(msgspec.Struct, frozen=True, kw_only=True, rename={"settings": "set"}):
    """The job with changed settings."""

    settings: dict[str, JsonValue]
    finding: str | None = None
    """Rule of the finding that suggests it."""
    bound: bool = False
    """Whether it simulates a job without the cause of the finding, with which a job cannot train."""
    expected_ms: float | None = None
    """Step time that the diagnosis predicts, scaled to the baseline measured here."""
    expected_range_ms: list[float] | None = None
    median_ms: float | None = None
    """Step time with the change, relative to the baseline over all trials."""
    interval_ms: list[float] | None = None
    baseline_mean_ms: float | None = None
    """Mean step of the baseline, if this change is compared by means because its cause occurs in some steps only. ``median_ms`` is
    then a mean too."""
    change: float | None = None
    """Step time divided by the baseline's, minus 1: negative is faster."""
    change_interval: list[float] | None = None
    trials_ms: list[float] = []
    """Step time of each trial, not corrected by the baseline's."""
    steps: int = 0
    trials: int = 0
    verdict: str
    why: str = ""
    """Why it failed, was not applied, or gave no result."""
    results: str = ""
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
    tool_version: str = ""
    created_ns: int | None = None
    command: list[str] = []
    """Masked."""
    steps_each: int = 0
    """Steps per trial, including warm-up."""
    baseline: Baseline
    variants: list[Variant] = []
    notes: list[str] = []

    def best(self) -> Variant | None:
        """The fastest variant that is faster and with which a job can train; None if there is none."""
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
    """Description of the first invalid value in ``report``; None if all are valid."""
    return next(_errors(report), None)


def _errors(report: TrialsReport) -> Iterator[str]:
    if len(report.variants) > MAX_VARIANTS:
        yield f"more than {MAX_VARIANTS} variants"
    if max(len(report.command), len(report.notes), len(report.baseline.failed)) > _MAX_LIST:
        yield f"a list of more than {_MAX_LIST:,} entries"
    if any(len(word) > _MAX_WORD for word in report.command):
        yield "a word of the command that is too long"
    if not 0 <= (report.created_ns or 0) <= _MAX_NS:
        yield "created_ns out of range"
    baseline = report.baseline
    yield from _too_long([report.tool_version, *report.notes, *baseline.failed])
    yield from _invalid_numbers([baseline.median_ms, *(baseline.interval_ms or [])])
    yield from _invalid_interval(baseline.interval_ms)
    if (baseline.median_ms or 0.0) < 0:
        yield "a step time below 0"
    counts = [report.steps_each, baseline.steps, baseline.trials]
    for variant in report.variants:
        yield from _variant_errors(variant)
        counts += [variant.steps, variant.trials]
    if any(not 0 <= count <= _MAX_NUMBER for count in counts):
        yield "a count out of range"


def _variant_errors(variant: Variant) -> Iterator[str]:
    if variant.verdict not in VERDICTS:
        yield f"a verdict that is none of {', '.join(VERDICTS)}"
    if len(variant.settings) > MAX_SETTINGS:
        yield f"a variant of more than {MAX_SETTINGS} settings"
    if not all(isinstance(value, bool | int | float | str) for value in variant.settings.values()):
        yield "a setting that is neither a number nor a text"
    values = variant.settings.values()
    says = [] if variant.parity is None else [variant.parity.says]
    yield from _too_long(
        [variant.finding or "", variant.why, variant.results, *says, *variant.settings]
        + [value for value in values if isinstance(value, str)]
    )
    intervals = (variant.interval_ms, variant.expected_range_ms, variant.change_interval)
    for ends in intervals:
        yield from _invalid_interval(ends)
    times = [variant.expected_ms, variant.median_ms, variant.baseline_mean_ms]
    if len(variant.trials_ms) > _MAX_LIST:
        yield f"a list of more than {_MAX_LIST:,} entries"
    times += variant.trials_ms
    numbers = [*times, variant.change, *(end for ends in intervals for end in ends or [])]
    yield from _invalid_numbers([*numbers, *(value for value in values if isinstance(value, int | float))])
    if any((time or 0.0) < 0 for time in times) or (variant.change is not None and variant.change <= -1):
        yield "a step time below 0"
    if variant.parity is not None:
        if len(variant.parity.losses) > _MAX_LIST or any(len(pair) > 2 for pair in variant.parity.losses):
            yield "losses that are no list of pairs"
        yield from _invalid_numbers(
            [variant.parity.norm_differs, *(loss for pair in variant.parity.losses for loss in pair)]
        )


def _too_long(texts: list[str]) -> Iterator[str]:
    if any(len(text) > _MAX_TEXT for text in texts):
        yield f"a text of more than {_MAX_TEXT} letters"


def _invalid_interval(ends: list[float] | None) -> Iterator[str]:
    if ends is not None and (len(ends) != 2 or not ends[0] <= ends[1]):
        yield "an interval that is none"


def _invalid_numbers(numbers: list[float | None]) -> Iterator[str]:
    if any(number is not None and not -_MAX_NUMBER <= number <= _MAX_NUMBER for number in numbers):
        yield "a number out of range"
