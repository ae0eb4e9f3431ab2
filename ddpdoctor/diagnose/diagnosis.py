"""The result of an analysis, from which all reports are made. As JSON, its schema is ``ddpdoctor.diagnosis/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from ddpdoctor.diagnose.trials import TrialsReport
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.runfacts import Standing
from ddpdoctor.measure.summary import (
    BandwidthPoint,
    Flame,
    FlameFrame,
    RankMemory,
    RankSummary,
    Series,
    Span,
    Speaker,
    TelemetrySeries,
    Timeline,
    WindowCost,
)
from ddpdoctor.severities import SEVERITIES

if TYPE_CHECKING:
    import plotly.graph_objects as go

    JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
else:
    JsonValue = Any  # msgspec does not support recursive types

DIAGNOSIS_SCHEMA = "ddpdoctor.diagnosis/1"
RUNNING, UNKNOWN = "running", "unknown"
"""Values of :attr:`Job.end`: the job was running when it was analysed, or its end is unknown."""

# Types of other packages that readers of a diagnosis need.
__all__ = ["SEVERITIES", "BandwidthPoint", "Flame", "FlameFrame", "RankMemory", "RankSummary", "Series"]
__all__ += ["Span", "Speaker", "Standing", "TelemetrySeries", "Timeline", "Where", "WindowCost"]


class Verdict(msgspec.Struct, frozen=True):
    """The first sentence of every report."""

    rule: str | None
    """Rule of the costliest finding; None if the job is healthy or no verdict is possible."""
    headline: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The job that ran, as far as known."""

    world_size: int | None = None
    ranks_seen: list[int] = []
    missing_ranks: list[int] = []
    hosts: list[str] = []
    backend: str | None = None
    device: str | None = None
    device_names: list[str] = []
    command: list[str] = []
    """Masked: no tokens, no passwords."""
    versions: dict[str, str] = {}
    settings: dict[str, JsonValue] = {}
    """DDP, DataLoader and thread settings by group, for the "job facts" section."""
    environment: dict[str, str] = {}
    started_ns: int | None = None
    duration_s: float | None = None
    exit_code: int | None = None
    end: str | None = None
    """How a recorded run ended, as known at the analysis: ended (by itself or on request), killed (by a signal that no launcher
    recorded as a request), running, cut off (its processes are gone without a recorded end), or unknown; null for traces."""
    folder_in_repository: str | None = None
    """Path of the folder with the user's source lines in its repository, such as "training"; "" for the repository's root, null
    if there was no repository at the analysis."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Step times on the critical path."""

    count: int = 0
    measured: int = 0
    source: str = "step-log"
    median_ms: float | None = None
    mean_ms: float | None = None
    p95_ms: float | None = None
    samples_per_s: float | None = None
    set_aside: dict[str, int] = {}
    """Steps not measured, by reason: warm-up, profiler, evaluation, ..."""
    window: WindowCost | None = None
    """Cost of ddpdoctor's own profiler window."""


class Evidence(msgspec.Struct, frozen=True):
    """One number that supports a finding."""

    fact: str
    value: JsonValue
    unit: str
    means: str


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """What to change, or how to find out more."""

    title: str
    why: str
    investigates: bool = False
    """Whether it is a step to find the cause, and changes nothing."""
    snippet: str | None = None
    trade_off: str | None = None
    docs: list[str] = []
    settings: dict[str, str] = {}
    """Settings that ``ddpdoctor try`` changes to test this fix, by name."""
    changed_at: list[str] = []
    """Calls in the user's script that can take this change, if a framework makes the model or the loader."""


class Coverage(msgspec.Struct, frozen=True):
    """Number of steps and ranks that were analysed."""

    steps: int
    ranks: int
    steps_hit: int | None = None
    """Of a finding, the steps in which its cause occurred; null if that is not counted."""

    def of_cost(self, cost: dict[str, Any] | None) -> Coverage:
        """The coverage of a finding with this cost, in which its steps are counted if they are known."""
        if not cost or not cost["steps_seen"]:
            return self
        return Coverage(cost["steps_seen"], self.ranks, cost["steps_hit"])


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One bottleneck."""

    rule: str
    severity: str
    title: str
    explanation: str = ""
    ranks: list[int] | None = None
    """The ranks that cause it; null if all of :attr:`Job.ranks_seen` contribute equally, even if that is one rank."""
    steps: list[int] | None = None
    """[first, last]; None if in all steps."""
    persistence: str | None = None
    """When it occurs in the steps that were examined (:attr:`coverage`): as of a cost in the facts. Whether "always" in 20 steps or fewer
    lasts is not known."""
    where: list[Where] = []
    costs_ms_per_step: float | None = None
    costs_ms_per_step_range: list[float] | None = None
    """[low, high]: 90 % interval of the time that a fix saves; null if there are too few data."""
    share: float | None = None
    costs_s: float | None = None
    """Seconds of this run that it costs; null if the number of the run's steps is unknown."""
    share_of_run: float | None = None
    """Share (0 to 1) of the run's wall time that it costs; null if that is unknown."""
    happens_once: bool = False
    """Whether the time is lost once in a run, or until some step, for example at the start. Such a cost has no speed-up."""
    speedup_if_fixed: float | None = None
    speedup_if_fixed_range: list[float] | None = None
    """[low, high] from the same interval."""
    at_most: bool = False
    """Whether the cost is an upper bound: a fix saves at most this, and the actual saving is unknown."""
    estimated: bool = False
    """Whether the cost depends on an assumption, given in the explanation, and is not an upper bound."""
    coverage: Coverage
    evidence: list[Evidence] = []
    fixes: list[Fix] = []
    bound: dict[str, str] = {}
    """Settings that ``ddpdoctor try`` changes to measure the most that a fix could save."""
    caused_by: str | None = None
    """Rule id of the finding whose effect this is."""
    question: str = ""
    """The question that the rule answers, the same in every finding of the rule."""
    read_more: str | None = None
    """URL of documentation on the rule's subject, the same in every finding of the rule."""
    limits: str = ""
    """When this finding is wrong."""

    def __repr__(self) -> str:
        price = "" if self.costs_ms_per_step is None else f", {self.costs_ms_per_step:.3g} ms per step"
        ranks = "" if self.ranks is None else f", of {len(self.ranks)} of the ranks"
        return f"<Finding {self.rule}: {self.severity}{price}{ranks}>"


class CheckedRule(msgspec.Struct, frozen=True):
    """A rule that was evaluated and found nothing."""

    rule: str
    title: str


class SkippedRule(msgspec.Struct, frozen=True):
    """A rule that was not evaluated (missing data, not applicable to the job, or an error in the rule), and why."""

    rule: str
    title: str
    why: str
    applies: bool = True
    """Whether the rule applies to the job, so that data were missing."""


class WaterfallBar(msgspec.Struct, frozen=True):
    """One bar of the chart from the measured step time to the step time without the findings."""

    label: str
    ms: float
    rule: str | None = None
    range_ms: list[float] | None = None
    """[low, high] of the time that fixing the finding saves, if known."""
    at_most: bool = False
    """Whether the finding's cost is an upper bound."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report shows."""

    schema: str = DIAGNOSIS_SCHEMA
    tool_version: str = ""
    created_ns: int | None = None
    source: list[str] = []
    """The paths that were analysed."""
    healthy: bool
    verdict: Verdict
    job: Job
    steps: Steps
    breakdown: dict[str, float] = {}
    """Shares of the critical step time; sum 1."""
    findings: list[Finding] = []
    notes: list[str] = []
    checked: list[CheckedRule] = []
    skipped: list[SkippedRule] = []
    ranks: list[RankSummary] = []
    standing: list[Standing] = []
    """Last known position of each rank, if the job stopped."""
    series: Series = Series()
    timeline: Timeline | None = None
    flames: list[Flame] = []
    """Stack samples of the slowest and of a typical rank; empty if none were recorded."""
    waterfall: list[WaterfallBar] = []
    bandwidth: list[BandwidthPoint] = []
    telemetry: list[TelemetrySeries] = []
    speaker: Speaker | None = None
    """The recording from which causes are determined; null for tables of operations."""
    facts: dict[str, JsonValue] = {}
    """Every fact by its path."""
    tried: TrialsReport | None = None
    """Results of ``ddpdoctor try`` for this run; null if there are none."""
    hta: dict[str, JsonValue] | None = None
    """Results of HolisticTraceAnalysis, if requested."""

    def __repr__(self) -> str:
        found = f"{len(self.findings)} finding{'' if len(self.findings) == 1 else 's'}"
        return f"<Diagnosis: {self.verdict.headline} ({found}, {self.steps.measured} of {self.steps.count} steps measured)>"

    def _repr_html_(self) -> str:
        """HTML for a notebook."""
        from ddpdoctor.report.html import notebook_html

        return notebook_html(self)

    def figures(self) -> dict[str, go.Figure]:
        """The report's charts as plotly figures, by name: ``waterfall``, ``run``, ``breakdown``, ``step_times``, ``lateness``,
        ``timeline``, ``bandwidth``, ``telemetry_...``; only those with data.

        Raises DdpDoctorError if plotly is not installed (the extra ``ddpdoctor[plot]``).
        """
        from ddpdoctor.report.figures.specs import figures

        return figures(self)


_Value = TypeVar("_Value")
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
"""Exact types that need no conversion; NumPy scalars can be subclasses of them."""


def without_numpy(value: _Value) -> _Value:
    """``value`` with NumPy scalars and arrays replaced by Python numbers and lists at any depth; the rest is not copied."""
    plain: _Value = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        pairs = [(_plain(key), _plain(item)) for key, item in value.items()]
        same = all(
            key is old and item is kept for (key, item), (old, kept) in zip(pairs, value.items(), strict=True)
        )
        return value if same else dict(pairs)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        same = all(item is old for item, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        changed = {name: plain for name in names if (plain := _plain(old := getattr(value, name))) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    return value
