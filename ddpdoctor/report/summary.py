"""The lines at the top of every report: cost of the main finding, what ran, how many steps were measured."""

from __future__ import annotations

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding, Steps
from ddpdoctor.report import words


def main_finding(diagnosis: Diagnosis) -> Finding | None:
    """The finding behind the verdict; None if the job is healthy or no verdict is possible."""
    if diagnosis.healthy or diagnosis.verdict.rule is None:
        return None
    named = [finding for finding in diagnosis.findings if finding.rule == diagnosis.verdict.rule]
    found = named or diagnosis.findings
    return found[0] if found else None


def cost_sentence(diagnosis: Diagnosis) -> str:
    """The cost of the main finding in one sentence; for a healthy job, the median step time. Empty if neither is known."""
    finding, median = main_finding(diagnosis), diagnosis.steps.median_ms
    if finding is None:
        return (
            ""
            if median is None
            else f"A step takes {words.milliseconds(median)} (median){_largest_part(diagnosis)}."
        )
    cost_ms, share = finding.costs_ms_per_step, finding.share
    gain = words.speedup_text(finding)
    if finding.at_most:
        return _saving_sentence("Upper bound", "at most", cost_ms, share, gain)
    if finding.estimated:
        return _saving_sentence("Estimate", "about", cost_ms, share, gain)
    pieces = []
    recorded = diagnosis.steps.source == "trace"
    in_some = finding.persistence not in (None, "always")
    over = " over the recorded steps" if recorded else " on average"
    if cost_ms is not None:
        one_step = diagnosis.steps.measured == 1
        each = "in the one recorded step" if one_step else f"per step{over if in_some else ''}"
        range_text = words.in_parentheses(words.cost_range(finding))
        pieces.append(f"It costs {words.milliseconds(cost_ms)} {each}{range_text}")
        if share is not None:
            pieces[-1] += f", {words.percent(share)} of the step time"
            if 1 / 60 <= share < 1 and not recorded:
                # A trace of a few steps says nothing about an hour.
                pieces[-1] += f" ({min(round(60 * share), 59)} min per hour)"
    if gain:
        pieces.append(
            f"the job would run {gain}{words.in_parentheses(words.speedup_range(finding))} as fast without it"
        )
    return f"{'; '.join(pieces)}." if pieces else ""


def _saving_sentence(kind: str, limit: str, cost_ms: float | None, share: float | None, gain: str) -> str:
    """The cost where only an upper bound or an estimate of the saving is known."""
    if cost_ms is None:
        return ""
    text = f"{kind}: fixing it saves {limit} {words.milliseconds(cost_ms)} per step"
    if share is not None:
        text += f", {words.percent(share)} of the step time"
    return f"{text}, and makes the job {limit} {gain} as fast." if gain else f"{text}."


def _largest_part(diagnosis: Diagnosis) -> str:
    if not diagnosis.breakdown:
        return ""
    name, share = max(diagnosis.breakdown.items(), key=lambda item: item[1])
    return f", {words.percent(share)} of it {words.part(name, diagnosis)}"


def subtitle(diagnosis: Diagnosis) -> str:
    """What ran, in one line: ranks, hosts, device, backend."""
    job = diagnosis.job
    world = job.world_size or len(job.ranks_seen) or len(diagnosis.ranks)
    pieces = [words.count(world, "rank")] if world else []
    if pieces and job.world_size is None and job.ranks_seen:
        pieces[-1] += " recorded"
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
    """How many of the recorded steps are measured, and why the others are excluded: "47 of 60 steps measured (excluded: disturbed
    by the profiler 10, warm-up 3)". The reasons add up."""
    reasons = sorted(steps.set_aside.items(), key=lambda entry: -entry[1])
    excluded = ", ".join(f"{reason} {count:,}" for reason, count in reasons if count)
    text = words.in_parentheses(f"excluded: {excluded}" if excluded else "")
    return f"{steps.measured:,} of {words.count(steps.count, 'step')} measured{text}"
