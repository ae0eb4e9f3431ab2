"""Diagnosis → the data of the HTML report's page. All decisions are made here; the templates only place the data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.diagnose.diagnosis import CheckedRule, Diagnosis, SkippedRule
from ddpdoctor.report import words
from ddpdoctor.report.attempts_view import attempts_table, trainings_table
from ddpdoctor.report.charts.bandwidth import Bandwidth, bandwidth
from ddpdoctor.report.charts.breakdown import Breakdown, breakdown
from ddpdoctor.report.charts.flames import FlameChart, flames
from ddpdoctor.report.charts.lateness import HeatMap, lateness
from ddpdoctor.report.charts.lines import LineChart, line_chart
from ddpdoctor.report.charts.telemetry import telemetry
from ddpdoctor.report.charts.timeline import TimelineChart, timeline
from ddpdoctor.report.charts.waterfall import WaterfallRow, waterfall
from ddpdoctor.report.charts.whole_run import WholeRun, whole_run
from ddpdoctor.report.experiment_view import ExperimentView, experiment_view
from ddpdoctor.report.figures.specs import InteractiveData, interactive_data
from ddpdoctor.report.finding_view import FindingView, Prose, finding_views, first_rows
from ddpdoctor.report.hang_view import Stack, hang_table, stacks
from ddpdoctor.report.job_view import Group, Table, command_line, flat, hta_tables, job_groups
from ddpdoctor.report.memory_view import memory_table
from ddpdoctor.report.summary import cost_sentence, main_finding, run_line, subtitle

LEAST_FOR_QUANTILES = 5
"""Fewest steps for which a median and a 95th percentile are shown."""

RANK_ROWS = 32
"""Most rows of the table of ranks; all ranks are in the report's data."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One report. Lists are empty, and charts None, where there is nothing to show."""

    healthy: bool
    title: str
    headline: Prose
    cost_sentence: str
    """The cost of the main finding, or for a healthy job the step time, in one sentence."""
    main: FindingView | None
    """The finding behind the verdict; None if there is none, or it is not among those shown."""
    subtitle: str
    run: str
    """Where the wall time of the run went, in one line; empty where that is not known."""
    numbers: list[tuple[str, str]]
    waterfall: list[WaterfallRow]
    findings: list[FindingView]
    more_findings: str
    """How many findings are not shown, in a sentence; "" if all are."""
    whole_run: WholeRun | None
    breakdown: Breakdown | None
    step_times: LineChart | None
    lateness: HeatMap | None
    timeline: TimelineChart | None
    flames: list[FlameChart]
    bandwidth: Bandwidth | None
    telemetry: list[LineChart]
    rank_table: Table | None
    memory_table: Table | None
    hang_table: Table | None
    """Where each rank of a hung job is."""
    attempts: Table | None
    """The attempts of a run that was restarted."""
    trainings: Table | None
    """The trainings of processes that take several."""
    stacks: list[Stack]
    checked: Sequence[CheckedRule]
    skipped: list[tuple[str, Sequence[SkippedRule]]]
    """Those that lacked data, and those that do not apply, each with a heading."""
    notes: list[Prose]
    """If there are more than :data:`~ddpdoctor.report.finding_view.MOST`, the last one says how many more."""
    found_nothing: int
    """Number of rules that found nothing, shown or not."""
    job: list[Group]
    reproduce: list[str]
    facts: list[tuple[str, str]]
    hta: list[Table]
    experiment: ExperimentView | None
    tool_version: str


def _main(diagnosis: Diagnosis, findings: Sequence[FindingView]) -> FindingView | None:
    main = main_finding(diagnosis)
    places = [index for index, finding in enumerate(diagnosis.findings[: len(findings)]) if finding is main]
    return findings[places[0]] if places else None


def _skipped(rules: Sequence[SkippedRule]) -> list[tuple[str, Sequence[SkippedRule]]]:
    lacking = [rule for rule in rules if rule.applies]
    others = [rule for rule in rules if not rule.applies]
    kinds = [(lacking, "lacked data"), (others, "does not apply" if len(others) == 1 else "do not apply")]
    return [
        (f"{words.count(len(found), 'check')} {what}", first_rows(found, "rule")[0])
        for found, what in kinds
        if found
    ]


def page(diagnosis: Diagnosis, data: InteractiveData | None = None) -> Page:
    """Everything that the HTML report shows. ``data``: the numbers of its interactive charts, if already gathered."""
    data = data or interactive_data(diagnosis)
    notes, more_notes = first_rows(diagnosis.notes, "note")
    findings = finding_views(diagnosis.findings, diagnosis.verdict.rule, words.all_ranks_label(diagnosis))
    return Page(
        healthy=diagnosis.healthy,
        title=f"ddpdoctor: {diagnosis.verdict.headline}",
        headline=words.split_code(diagnosis.verdict.headline),
        cost_sentence=cost_sentence(diagnosis),
        main=_main(diagnosis, findings),
        subtitle=subtitle(diagnosis),
        run=run_line(diagnosis),
        numbers=numbers(diagnosis),
        waterfall=waterfall(diagnosis),
        findings=findings,
        more_findings=first_rows(diagnosis.findings, "finding")[1],
        whole_run=whole_run(diagnosis),
        breakdown=breakdown(diagnosis),
        step_times=line_chart(data.times),
        lateness=lateness(data.late),
        timeline=timeline(data.step),
        flames=flames(diagnosis),
        bandwidth=bandwidth(diagnosis),
        telemetry=telemetry(diagnosis),
        rank_table=_rank_table(diagnosis),
        memory_table=memory_table(diagnosis),
        hang_table=hang_table(diagnosis),
        attempts=attempts_table(diagnosis),
        trainings=trainings_table(diagnosis),
        stacks=stacks(diagnosis),
        checked=first_rows(diagnosis.checked, "rule")[0],
        skipped=_skipped(diagnosis.skipped),
        notes=[words.split_code(note) for note in (*notes, *filter(None, [more_notes]))],
        found_nothing=len(diagnosis.checked),
        job=job_groups(diagnosis),
        reproduce=reproduce(diagnosis),
        facts=flat(diagnosis.facts),
        hta=hta_tables(diagnosis.hta),
        experiment=None if diagnosis.tried is None else experiment_view(diagnosis.tried),
        tool_version=diagnosis.tool_version,
    )


def numbers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The numbers under the verdict: (name, value). Unknown ones are omitted."""
    steps, rows = diagnosis.steps, []
    several = steps.measured >= LEAST_FOR_QUANTILES
    if steps.median_ms is not None:
        rows.append(("step time (median)" if several else "step time", words.milliseconds(steps.median_ms)))
    if steps.p95_ms is not None and several:
        rows.append(("95 % of steps within", words.milliseconds(steps.p95_ms)))
    if steps.samples_per_s is not None:
        rows.append(("samples per second", words.significant(steps.samples_per_s)))
    if steps.measured:
        rows.append(
            (
                "steps measured",
                f"{steps.measured:,} of {steps.count:,}" if steps.count else f"{steps.measured:,}",
            )
        )
    return rows


def reproduce(diagnosis: Diagnosis) -> list[str]:
    """Commands that produce this report again; those with unknown input are omitted."""
    lines = []
    if diagnosis.job.command:
        lines.append(f"ddpdoctor run -- {command_line(diagnosis.job.command)}")
    if diagnosis.source:
        lines.append(f"ddpdoctor analyze {command_line(diagnosis.source)} --html report.html")
    return lines


def _rank_table(diagnosis: Diagnosis) -> Table | None:
    if not diagnosis.ranks:
        return None
    head = ["rank", "host", "device", "step", "late by", "delays others by"]
    order = sorted(diagnosis.ranks, key=lambda rank: -(rank.caused_wait_ms or 0.0))[:RANK_ROWS]
    rows = [
        [
            str(rank.rank),
            rank.host or words.ABSENT,
            rank.device or words.ABSENT,
            words.milliseconds(rank.step_ms),
            words.milliseconds(rank.late_ms),
            words.milliseconds(rank.caused_wait_ms),
        ]
        for rank in sorted(order, key=lambda rank: rank.rank)
    ]
    left = len(diagnosis.ranks) - len(rows)
    title = "Ranks" if not left else f"The {len(rows)} of {len(diagnosis.ranks)} ranks that delay others most"
    return Table(title, head, rows)
