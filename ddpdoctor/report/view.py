"""Diagnosis → the plain data of a report's page: everything decided here, templates only place it."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnose.diagnosis import CheckedRule, Diagnosis, Finding, SkippedRule, Steps
from ddpdoctor.report import words
from ddpdoctor.report.charts.bandwidth import Bandwidth, bandwidth
from ddpdoctor.report.charts.breakdown import Breakdown, breakdown
from ddpdoctor.report.charts.lateness import HeatMap, lateness
from ddpdoctor.report.charts.lines import LineChart
from ddpdoctor.report.charts.step_times import step_times
from ddpdoctor.report.charts.telemetry import telemetry
from ddpdoctor.report.charts.timeline import TimelineChart, timeline
from ddpdoctor.report.charts.waterfall import WaterfallRow, waterfall
from ddpdoctor.report.finding_view import FindingView, Prose, finding_views
from ddpdoctor.report.job_view import Group, Table, command_line, flat, hta_tables, job_groups
from ddpdoctor.report.standing_view import Stack, stacks, standing_table
from ddpdoctor.report.tried import TriedView, tried_view

LEAST_FOR_QUANTILES = 5
"""Fewest steps of which a median and a 95th percentile are told."""

RANK_ROWS = 32
"""Most rows of the table of ranks; all ranks are in the report's data."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One report. Lists are empty, and charts None, where there is nothing to show."""

    healthy: bool
    title: str
    headline: Prose
    price: str
    """The verdict's price, or what the calm page says instead, in one sentence."""
    subtitle: str
    numbers: list[tuple[str, str]]
    waterfall: list[WaterfallRow]
    findings: list[FindingView]
    breakdown: Breakdown | None
    step_times: LineChart | None
    lateness: HeatMap | None
    timeline: TimelineChart | None
    bandwidth: Bandwidth | None
    telemetry: list[LineChart]
    rank_table: Table | None
    standing: Table | None
    """Where each rank of a job that stopped is."""
    stacks: list[Stack]
    checked: list[CheckedRule]
    skipped: list[SkippedRule]
    notes: list[Prose]
    job: list[Group]
    reproduce: list[str]
    facts: list[tuple[str, str]]
    hta: list[Table]
    tried: TriedView | None
    tool_version: str


def page(diagnosis: Diagnosis) -> Page:
    """Everything that the HTML report shows."""
    findings = finding_views(diagnosis.findings, diagnosis.verdict.rule, words.everybody(diagnosis.job))
    return Page(
        healthy=diagnosis.healthy,
        title=f"ddpdoctor: {diagnosis.verdict.headline}",
        headline=words.pieces(diagnosis.verdict.headline),
        price=price(diagnosis),
        subtitle=subtitle(diagnosis),
        numbers=numbers(diagnosis),
        waterfall=waterfall(diagnosis),
        findings=findings,
        breakdown=breakdown(diagnosis),
        step_times=step_times(diagnosis),
        lateness=lateness(diagnosis),
        timeline=timeline(diagnosis),
        bandwidth=bandwidth(diagnosis),
        telemetry=telemetry(diagnosis),
        rank_table=_rank_table(diagnosis),
        standing=standing_table(diagnosis),
        stacks=stacks(diagnosis),
        checked=diagnosis.checked,
        skipped=diagnosis.skipped,
        notes=[words.pieces(note) for note in diagnosis.notes],
        job=job_groups(diagnosis),
        reproduce=reproduce(diagnosis),
        facts=flat(diagnosis.facts),
        hta=hta_tables(diagnosis.hta),
        tried=None if diagnosis.tried is None else tried_view(diagnosis.tried),
        tool_version=diagnosis.tool_version,
    )


def main_finding(diagnosis: Diagnosis) -> Finding | None:
    """The finding that the verdict is about; None where the job is healthy."""
    if diagnosis.healthy:
        return None
    named = [finding for finding in diagnosis.findings if finding.rule == diagnosis.verdict.rule]
    found = named or diagnosis.findings
    return found[0] if found else None


def price(diagnosis: Diagnosis) -> str:
    """What the verdict costs, in one sentence; for a healthy job, what a step takes.

    Empty where nothing is known.
    """
    finding, median = main_finding(diagnosis), diagnosis.steps.median_ms
    if finding is None:
        return (
            ""
            if median is None
            else f"A step takes {words.milliseconds(median)} (median){_main_part(diagnosis)}."
        )
    cost_ms, share = finding.costs_ms_per_step, finding.share
    gain = words.gain(finding)
    if finding.at_most:
        return _ceiling(cost_ms, share, gain)
    pieces = []
    recorded = diagnosis.steps.source == "trace"
    in_some = recorded and finding.persistence not in (None, "always")
    if cost_ms is not None:
        cost = words.milliseconds(cost_ms) + words.aside(words.cost_range(finding))
        each = "the one recorded step" if diagnosis.steps.measured == 1 else "every step"
        pieces.append(
            f"Over the recorded steps it costs {cost} a step" if in_some else f"It costs {cost} of {each}"
        )
        if share is not None:
            pieces[-1] += f", {words.percent(share)} of the time"
            if 1 / 60 <= share < 1 and not recorded:
                # Of a whole run: a trace of a few steps does not tell what an hour holds.
                pieces[-1] += f" ({min(round(60 * share), 59)} min of each hour)"
    if gain:
        pieces.append(
            f"the job would run {gain}{words.aside(words.speedup_range(finding))} as fast without it"
        )
    return f"{'; '.join(pieces)}." if pieces else ""


def _ceiling(cost_ms: float | None, share: float | None, gain: str) -> str:
    """A price of which nobody can say how much will be saved: told as a bound, and not as a promise."""
    if cost_ms is None:
        return ""
    told = f"Fixing it saves at most {words.milliseconds(cost_ms)} a step"
    if share is not None:
        told += f", {words.percent(share)} of the time"
    return f"{told}, and makes the job at most {gain} as fast." if gain else f"{told}."


def _main_part(diagnosis: Diagnosis) -> str:
    if not diagnosis.breakdown:
        return ""
    name, share = max(diagnosis.breakdown.items(), key=lambda item: item[1])
    return f", {words.percent(share)} of it {words.part(name, diagnosis.job)}"


def subtitle(diagnosis: Diagnosis) -> str:
    """What ran, in one line: ranks, hosts, device, backend."""
    job = diagnosis.job
    world = job.world_size or len(job.ranks_seen) or len(diagnosis.ranks)
    pieces = [words.count(world, "rank")] if world else []
    if job.world_size and job.ranks_seen and len(job.ranks_seen) < job.world_size:
        pieces[-1] += f" ({len(job.ranks_seen)} recorded)"
    if job.hosts:
        pieces.append(words.count(len(set(job.hosts)), "host"))
    if job.device_names:
        pieces.append(", ".join(list(dict.fromkeys(job.device_names))[:3]))
    elif job.device:
        pieces.append(job.device)
    if job.backend:
        pieces.append(job.backend)
    if "torch" in job.versions:
        pieces.append(f"torch {job.versions['torch']}")
    return " · ".join(pieces)


def steps_measured(steps: Steps) -> str:
    """How many of the recorded steps are measured, and what became of the others: "47 of 60 steps measured (disturbed by the
    profiler: 10, warm-up: 3)". The reasons add up."""
    aside = sorted(steps.set_aside.items(), key=lambda entry: -entry[1])
    told = ", ".join(f"{reason}: {count:,}" for reason, count in aside if count)
    return f"{steps.measured:,} of {words.count(steps.count, 'step')} measured{words.aside(told)}"


def numbers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The few numbers that belong under the verdict: (what, value). Unknown ones are left out."""
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
    """Commands that lead to this report again; those whose input is unknown are left out."""
    lines = []
    if diagnosis.job.command:
        lines.append(f"ddpdoctor run -- {command_line(diagnosis.job.command)}")
    if diagnosis.source:
        lines.append(f"ddpdoctor analyze {command_line(diagnosis.source[:4])} --html report.html")
    return lines


def _rank_table(diagnosis: Diagnosis) -> Table | None:
    if not diagnosis.ranks:
        return None
    head = ["rank", "host", "device", "step", "late by", "keeps others waiting"]
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
    title = (
        "Ranks"
        if not left
        else f"The {len(rows)} ranks that keep others waiting most, of {len(diagnosis.ranks)}"
    )
    return Table(title, head, rows)
