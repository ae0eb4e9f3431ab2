"""Diagnosis → the data of the HTML report's page. All decisions are made here; the templates only place the data."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from ddpdoctor.diagnose.diagnosis import Diagnosis, SkippedRule
from ddpdoctor.report import words
from ddpdoctor.report.charts.bandwidth import bandwidth
from ddpdoctor.report.charts.bars import breakdown, waterfall, whole_run
from ddpdoctor.report.charts.flames import flames
from ddpdoctor.report.charts.lateness import lateness
from ddpdoctor.report.charts.lines import line_chart
from ddpdoctor.report.charts.series import telemetry
from ddpdoctor.report.charts.timeline import timeline
from ddpdoctor.report.experiment_view import experiment_view
from ddpdoctor.report.figures.specs import InteractiveData, interactive_data
from ddpdoctor.report.finding_view import finding_views, first_rows
from ddpdoctor.report.job_view import command_line, flat, hta_tables, job_groups
from ddpdoctor.report.summary import cost_sentence, main_finding, run_line, subtitle
from ddpdoctor.report.tables import (
    attempts_table,
    hang_table,
    memory_table,
    rank_table,
    stacks,
    trainings_table,
)

LEAST_FOR_QUANTILES = 5
"""Fewest steps for which a median and a 95th percentile are shown."""


def _main(diagnosis: Diagnosis, findings: Sequence[SimpleNamespace]) -> SimpleNamespace | None:
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


def page(diagnosis: Diagnosis, data: InteractiveData | None = None) -> SimpleNamespace:
    """Everything that the HTML report shows. ``data``: the numbers of its interactive charts, if already gathered.

    Lists are empty, texts "" and charts None where there is nothing to show.
    """
    data = data or interactive_data(diagnosis)
    notes, more_notes = first_rows(diagnosis.notes, "note")
    findings = finding_views(diagnosis.findings, diagnosis.verdict.rule, words.all_ranks_label(diagnosis))
    return SimpleNamespace(
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
        rank_table=rank_table(diagnosis),
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
