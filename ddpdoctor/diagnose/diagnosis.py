"""The diagnosis: the one thing that reports read. Its JSON form is the schema ``ddpdoctor.diagnosis/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.diagnose.jsonvalue import JsonValue
from ddpdoctor.diagnose.tried import Answer
from ddpdoctor.measure.hangfacts import Standing
from ddpdoctor.measure.places import Where
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

DIAGNOSIS_SCHEMA = "ddpdoctor.diagnosis/1"
RUNNING, UNKNOWN = "running", "unknown"
"""``end`` of a job that ran when it was analysed, and of one of which nobody can say whether it did."""

__all__ = [
    "DIAGNOSIS_SCHEMA",
    "SEVERITIES",
    "BandwidthPoint",
    "CheckedRule",
    "Coverage",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Fix",
    "Flame",
    "FlameFrame",
    "Job",
    "RankMemory",
    "RankSummary",
    "Series",
    "SkippedRule",
    "Span",
    "Speaker",
    "Standing",
    "Steps",
    "TelemetrySeries",
    "Timeline",
    "Verdict",
    "WaterfallBar",
    "Where",
    "WindowCost",
]


class Verdict(msgspec.Struct, frozen=True):
    """The first sentence of every report."""

    rule: str | None
    """Rule of the costliest finding; None where the job is healthy, and where nothing can be told."""
    headline: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What ran, as far as known."""

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
    """Of a recorded run, what was known of its end when it was analysed: ended (by itself, or because it was asked to), killed (by
    a signal that no launcher noted as a request), running, cut off (its processes are gone, and nobody noted how), or unknown; null of
    traces."""
    folder_in_repository: str | None = None
    """Where the folder that holds the user's lines lies in its repository, such as "training"; "" for the repository itself, null
    where there was none at the analysis."""


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
    """What our own profiler window cost."""


class Evidence(msgspec.Struct, frozen=True):
    """One number behind a finding."""

    fact: str
    value: JsonValue
    unit: str
    means: str


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """What to change."""

    title: str
    why: str
    snippet: str | None = None
    trade_off: str | None = None
    docs: list[str] = []
    settings: dict[str, str] = {}
    """What ``ddpdoctor try`` changes to try it, by the names of its settings."""


class Coverage(msgspec.Struct, frozen=True):
    """How much was looked at."""

    steps: int
    ranks: int


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One bottleneck."""

    rule: str
    severity: str
    title: str
    explanation: str = ""
    ranks: list[int] | None = None
    steps: list[int] | None = None
    """[first, last], None where always."""
    persistence: str | None = None
    where: list[Where] = []
    costs_ms_per_step: float | None = None
    costs_ms_per_step_range: list[float] | None = None
    """[low, high]: what mending it saves lies there nine times in ten; null where too little is known to tell."""
    share: float | None = None
    speedup_if_fixed: float | None = None
    speedup_if_fixed_range: list[float] | None = None
    """[low, high], of the same range."""
    at_most: bool = False
    """The price is a ceiling: no more than this can be saved, and how much of it cannot be told."""
    estimated: bool = False
    """The cost depends on an assumption that the explanation states, and is no upper bound."""
    coverage: Coverage
    evidence: list[Evidence] = []
    fixes: list[Fix] = []
    bound: dict[str, str] = {}
    """What ``ddpdoctor try`` changes to measure what mending it could bring at most."""
    caused_by: str | None = None
    """Rule id of the finding of which this is an effect."""
    question: str = ""
    """What the rule asks, the same in every finding of it."""
    read_more: str | None = None
    """Address of a page about what the rule looks at, the same in every finding of it."""
    limits: str = ""
    """When this finding is wrong."""

    def __repr__(self) -> str:
        price = "" if self.costs_ms_per_step is None else f", {self.costs_ms_per_step:.3g} ms per step"
        ranks = "" if self.ranks is None else f", of {len(self.ranks)} of the ranks"
        return f"<Finding {self.rule}: {self.severity}{price}{ranks}>"


class CheckedRule(msgspec.Struct, frozen=True):
    """A rule that looked and found nothing."""

    rule: str
    title: str


class SkippedRule(msgspec.Struct, frozen=True):
    """A rule that could not look, does not apply, or crashed, and why."""

    rule: str
    title: str
    why: str
    applies: bool = True
    """Whether the rule applies to the job, so that data were lacking."""


class WaterfallBar(msgspec.Struct, frozen=True):
    """One bar from the measured step time towards what it could be."""

    label: str
    ms: float
    rule: str | None = None
    range_ms: list[float] | None = None
    """[low, high] of what the finding saves, where that is known."""


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
    """Where each rank was last seen, of a job that stopped."""
    series: Series = Series()
    timeline: Timeline | None = None
    flames: list[Flame] = []
    """Stack samples of the slowest rank and a usual one; empty where none were taken."""
    waterfall: list[WaterfallBar] = []
    bandwidth: list[BandwidthPoint] = []
    telemetry: list[TelemetrySeries] = []
    speaker: Speaker | None = None
    """Which recording speaks of causes; null for tables of operations."""
    facts: dict[str, JsonValue] = {}
    """Every fact by its path, for those who want the numbers."""
    tried: Answer | None = None
    """What changes of the job brought that ``ddpdoctor try`` measured; null where none were."""
    hta: dict[str, JsonValue] | None = None
    """HolisticTraceAnalysis's own results, where asked for."""

    def __repr__(self) -> str:
        found = f"{len(self.findings)} finding{'' if len(self.findings) == 1 else 's'}"
        return f"<Diagnosis: {self.verdict.headline} ({found}, {self.steps.measured} of {self.steps.count} steps measured)>"

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        from ddpdoctor.report import notebook_html

        return notebook_html(self)

    def figures(self) -> dict[str, go.Figure]:
        """The report's charts as figures of plotly, by name: ``waterfall``, ``breakdown``, ``step_times``, ``lateness``,
        ``timeline``, ``bandwidth``, ``telemetry_...``; those for which there are numbers.

        Raises DdpDoctorError where plotly is not installed (the extra ``ddpdoctor[plot]``).
        """
        from ddpdoctor.report.figures.plotly_bundle import figures

        return figures(self)
