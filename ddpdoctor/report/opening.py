"""What every report begins with: the price of its verdict, what ran, how many steps were measured."""

from __future__ import annotations

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding, Steps
from ddpdoctor.report import words


def main_finding(diagnosis: Diagnosis) -> Finding | None:
    """The finding that the verdict is about; None where the job is healthy, or nobody can tell."""
    if diagnosis.healthy or diagnosis.verdict.rule is None:
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
    in_some = finding.persistence not in (None, "always")
    over = "Over the recorded steps" if recorded else "On average"
    if cost_ms is not None:
        cost = words.milliseconds(cost_ms) + words.aside(words.cost_range(finding))
        each = "the one recorded step" if diagnosis.steps.measured == 1 else "every step"
        pieces.append(f"{over} it costs {cost} a step" if in_some else f"It costs {cost} of {each}")
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
    """How many of the recorded steps are measured, and what became of the others: "47 of 60 steps measured (disturbed by the
    profiler: 10, warm-up: 3)". The reasons add up."""
    aside = sorted(steps.set_aside.items(), key=lambda entry: -entry[1])
    told = ", ".join(f"{reason}: {count:,}" for reason, count in aside if count)
    return f"{steps.measured:,} of {words.count(steps.count, 'step')} measured{words.aside(told)}"
