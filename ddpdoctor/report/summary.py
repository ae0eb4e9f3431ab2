"""The lines at the top of every report: the cost of the main finding, what ran, how many steps were measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from posixpath import basename

from ddpdoctor.diagnose import rule_texts
from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding, Steps
from ddpdoctor.report import words
from ddpdoctor.report.finding_view import location


def main_finding(diagnosis: Diagnosis) -> Finding | None:
    """The finding that the verdict names, or the first finding if that one is missing; None if the job is healthy or no verdict is
    possible."""
    if diagnosis.healthy or diagnosis.verdict.rule is None:
        return None
    verdict_findings = [finding for finding in diagnosis.findings if finding.rule == diagnosis.verdict.rule]
    found = verdict_findings or diagnosis.findings
    return found[0] if found else None


def explained_findings(diagnosis: Diagnosis) -> list[Finding]:
    """The findings that reports explain in full: the main one, and the next one above "info" if it costs nearly as much and is as
    certain."""
    main = main_finding(diagnosis)
    if main is None:
        return []
    similar_cost = [
        finding
        for finding in diagnosis.findings
        if finding.severity != "info"
        and finding.caused_by is None
        and finding.rule != main.rule
        and (finding.share or 0.0) >= _MIN_COST_RATIO * (main.share or 1.0)
        and finding.at_most <= main.at_most
        and finding.estimated <= main.estimated
    ]
    return [main, *similar_cost[:1]]


_MIN_COST_RATIO = 0.75


def cost_sentence(diagnosis: Diagnosis) -> str:
    """One sentence: the cost of the main finding; without a main finding, the median step time. Empty if this is unknown, or if the step
    time is that of a truncated recording."""
    finding, median_ms = main_finding(diagnosis), diagnosis.steps.median_ms
    if finding is None and median_ms is None:
        return ""
    if finding is None:
        if words.lookup(diagnosis.facts, "steps.truncated"):
            return ""
        if words.lookup(diagnosis.facts, "steps.marked") is False:
            return f"The recording takes {words.milliseconds(median_ms)}{_largest_part(diagnosis)}."
        median = "" if diagnosis.steps.measured == 1 else " (median)"
        return f"A step takes {words.milliseconds(median_ms)}{median}{_largest_part(diagnosis)}."
    if finding.costs_ms_per_step is None and finding.costs_s is not None:
        in_headline = f" {rule_texts.ms(1000.0 * finding.costs_s)}" in diagnosis.verdict.headline
        return "" if in_headline else _total_sentence(finding)
    if limit := words.cost_prefix(finding):
        return _saving_sentence(limit, finding, diagnosis)
    gain = words.speedup_text(finding)
    speedup = f"{gain}{words.in_parentheses(words.speedup_range(finding))}"
    parts = _is_part_of_joint_cost(finding)
    clauses = [
        f"{_cost_clause(finding, diagnosis)}{', as its part of a delay with several causes' if parts else ''}",
        f"{'fixed alone' if parts else 'without it'}, steps would run {speedup} as fast" if gain else "",
    ]
    text = "; ".join(filter(None, clauses))
    return f"{text}." if text else ""


def _is_part_of_joint_cost(finding: Finding) -> bool:
    """Whether fixing it alone saves clearly more or less than its cost, because other ranks are late in the same steps."""
    if not finding.share or not finding.speedup_if_fixed:
        return False
    saved_share = 1.0 - 1.0 / finding.speedup_if_fixed
    return abs(saved_share - finding.share) > _MIN_DIFFERENCE * finding.share


_MIN_DIFFERENCE = 0.02
"""A smaller difference, as a share of the cost, is hardly visible in rounded numbers."""


def _cost_clause(finding: Finding, diagnosis: Diagnosis) -> str:
    """ "Cost: 18 ms per step (90 % interval: 15 to 20 ms), 26 % of the step time (16 min per training hour)"; "" if the finding has no
    cost per step."""
    cost_ms, share, steps = finding.costs_ms_per_step, finding.share, diagnosis.steps
    is_trace, marked = steps.source == "trace", words.lookup(diagnosis.facts, "steps.marked") is not False
    if cost_ms is None:
        return ""
    if not marked:
        when = "in the recording, which marks no steps"
    elif steps.measured == 1:
        when = "in the one recorded step"
    elif finding.persistence in (None, "always"):
        when = "per step"
    else:
        when = f"per step {'over the recorded steps' if is_trace else 'on average'}"
    interval = words.cost_range(finding)
    text = f"Cost: {words.milliseconds(cost_ms)} {when}"
    text += words.in_parentheses(f"90 % interval: {interval}" if interval else "")
    if share is None:
        return text
    text += f", {_share_of_step(finding, diagnosis)}"
    # A few steps do not show what an hour of training costs.
    few = is_trace or finding.coverage.steps <= rule_texts.FEW_STEPS
    if few or not 1 / 60 <= share < 1:
        return text
    return f"{text} ({min(round(60 * share), 59)} min per training hour)"


def _share_of_step(finding: Finding, diagnosis: Diagnosis) -> str:
    """ "26 % of the step time". If the share does not refer to the mean measured step, the text names the step that it refers to: that of
    the profiler window, or the mean of all steps, including excluded ones with this cost. ``finding`` must have a share."""
    cost_ms, share, mean_ms = finding.costs_ms_per_step, finding.share or 0.0, diagnosis.steps.mean_ms
    if words.step_label(diagnosis) == "recording":
        return f"{words.percent(share)} of its time"
    speaker = diagnosis.speaker
    if cost_ms and share and mean_ms and abs(cost_ms / share / mean_ms - 1) >= _MIN_STEP_DIFFERENCE:
        step = words.milliseconds(cost_ms / share)
        if speaker is not None and speaker.recording == "window":
            return f"{words.percent(share)} of the {step} that a step takes in the profiler window"
        return f"{words.percent(share)} of the {step} mean step that includes it"
    return f"{words.percent(share)} of the step time"


_MIN_STEP_DIFFERENCE = 0.02
"""If the step that a share refers to differs from the mean measured step by at least this part, the text names it."""


def _total_sentence(finding: Finding) -> str:
    """A sentence on the cost of a finding whose lost time is known for the run only, not per step."""
    share = finding.share_of_run
    share_text = "" if share is None else f", {words.percent(share)} of its wall time"
    return f"Cost: {words.seconds(finding.costs_s)} of this run{share_text}."


def _saving_sentence(limit: str, finding: Finding, diagnosis: Diagnosis) -> str:
    """A sentence on the possible saving, of which only an upper bound (``limit``: "at most ") or an estimate ("about ") is known."""
    cost_ms, share = finding.costs_ms_per_step, finding.share
    if cost_ms is None:
        return ""
    when = words.per_step(diagnosis) or " in the recording"
    text = f"{limit.capitalize()}{words.milliseconds(cost_ms)}{when}"
    text += (
        f", {_share_of_step(finding, diagnosis)}, could be saved" if share is not None else " could be saved"
    )
    gain = words.speedup_text(finding, limit)
    return f"{text}: a speed-up of {gain}." if gain else f"{text}."


def _largest_part(diagnosis: Diagnosis) -> str:
    if not diagnosis.breakdown:
        return ""
    name, share = max(diagnosis.breakdown.items(), key=lambda item: item[1])
    return f"; {words.percent(share)} of its critical path is {words.part(name, diagnosis)}"


def subtitle(diagnosis: Diagnosis) -> str:
    """One line on what ran: ranks, hosts, device, backend, torch."""
    job = diagnosis.job
    world = job.world_size or len(job.ranks_seen) or len(diagnosis.ranks)
    pieces = [words.count(world, "rank")] if world else []
    if pieces and job.world_size is None and job.ranks_seen:
        pieces[-1] += " recorded"
    if job.world_size and job.ranks_seen and len(job.ranks_seen) < job.world_size:
        pieces[-1] += f" ({len(job.ranks_seen)} recorded)"
    requested = ranks_of_command(job.command)
    if pieces and requested is not None and requested > world:
        pieces[-1] += f" (the command asks for {requested})"
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
    """Number of measured steps, and of excluded steps by reason: "47 of 60 steps measured (excluded: 10 at the profiler's start or
    stop, 3 warm-up)"."""
    reasons = sorted(steps.set_aside.items(), key=lambda entry: -entry[1])
    excluded = ", ".join(
        f"{count:,} {words.EXCLUDED.get(reason, reason)}" for reason, count in reasons if count
    )
    text = words.in_parentheses(f"excluded: {excluded}" if excluded else "")
    return f"{steps.measured:,} of {words.count(steps.count, 'step')} measured{text}"


def collectives_line(diagnosis: Diagnosis) -> str:
    """One line on the collectives, such as "communication per step: 4 allreduce (25 MiB), 2 broadcast"; "" if none are known."""
    counts = words.numbers_fact(diagnosis, "communication.operations_per_step")
    sizes = words.numbers_fact(diagnosis, "communication.operation_bytes_per_step")
    shown = [
        f"{words.strip_zeros(words.significant(count))} {_POINT_TO_POINT.get(name, name)}"
        + words.in_parentheses(words.size(sizes[name]) if name in sizes else "")
        + (_UNBUCKETED if name == "allreduce" and count >= _MIN_UNBUCKETED else "")
        for name, count in list(counts.items())[:_MAX_OPERATIONS]
    ]
    where = words.per_step(diagnosis) or " in the recording"
    return f"communication{where}: {', '.join(shown)}" if shown else ""


_POINT_TO_POINT = {"sendrecv": "send/recv"}
_MAX_OPERATIONS = 4
_MIN_UNBUCKETED = 100
"""So many reductions per step are not those of DDP's buckets: a hundred buckets of the default 25 MiB would be 2.5 GiB of gradients."""
_UNBUCKETED = " (each adds latency; with the buckets of DDP there would be few)"
_RUN_LABELS = {
    "other": "other",
    "start": "start (imports, rendezvous)",
    "preparation": "preparation (model, data)",
}
_MIN_PART_SHARE = 0.01
"""Minimum share of the wall time for a part to be listed separately; smaller parts are combined as "other"."""
_MIN_OTHER_SHARE = 0.005
"""Minimum share of the wall time for "other" to be listed; less is within the rounding of the parts."""


def run_line(diagnosis: Diagnosis) -> str:
    """One line on the wall time of the run: "Run: 41 s = start 12 s + steps 8 s + pauses 20 s + end 1 s; goodput 19 %
    (400 steps of usual length / wall time)". Empty if the launcher's start and end are unknown."""
    parts_s = words.run_parts(diagnosis, _MIN_PART_SHARE, _MIN_OTHER_SHARE)
    if not parts_s:
        return ""
    paused_at = next((location(each) for each in diagnosis.findings if each.rule == "run/pause"), "")
    where = {"pauses": f" at {paused_at}"} if paused_at else {}
    shown = " + ".join(
        f"{_RUN_LABELS.get(part) or words.part(part, diagnosis)} {words.seconds(value)}{where.get(part, '')}"
        for part, value in parts_s.items()
    )
    goodput = words.number_fact(diagnosis, "run.goodput")
    share = "" if goodput is None else f"; goodput {words.percent(goodput)} ({goodput_formula(diagnosis)})"
    return f"Run: {words.seconds(words.number_fact(diagnosis, 'run.wall_s'))} = {shown}{share}"


def goodput_formula(diagnosis: Diagnosis) -> str:
    """How the goodput was calculated: "243 steps of usual length / wall time"."""
    steps = _useful_steps(diagnosis)
    return f"{words.count(steps, 'step') if steps else 'steps'} of usual length / wall time"


def _useful_steps(diagnosis: Diagnosis) -> int:
    """Number of steps of all attempts, without repeated ones; 0 if unknown."""
    attempts = words.lookup(diagnosis.facts, "run.attempts")
    if not isinstance(attempts, list) or len(attempts) < 2:
        return round(words.number_fact(diagnosis, "run.steps") or 0.0)
    counts = [each.get("steps") for each in attempts if isinstance(each, dict)]
    repeated = round(words.number_fact(diagnosis, "run.restarts.repeated_steps") or 0.0)
    return sum(count for count in counts if isinstance(count, int)) - repeated


_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "srun")
_LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "deepspeed",
    *_MPI,
)


def ranks_of_command(command: Sequence[str], *, search_all_words: bool = False) -> int | None:
    """Number of ranks that a command starts on this host, from the options of the launchers (the words before the script or module); None
    if unknown.

    ``search_all_words``: if the launchers have no such option, use one from anywhere in the command, such as from the arguments of a shell
    script, although it may mean something else there. ``-n`` counts only after a launcher of MPI or Slurm, not in ``nice -n 10``.
    """

    def number(arguments: Sequence[str], *names: str) -> int:
        for word, value in zip(arguments, (*arguments[1:], ""), strict=False):
            name, equals, own = word.partition("=")
            text = own if equals else value
            if name.replace("_", "-") in names and text.isdecimal():
                return int(text)
        return 0

    def after(launchers: Sequence[str]) -> Sequence[str]:
        return next((before[at:] for at, word in enumerate(before) if _names_launcher(word, launchers)), [])

    before = command[: _end_of_launchers(command)]
    return (
        number(after(_LAUNCHERS), "--nproc-per-node", "--num-processes", "--num-gpus", "--num-accelerators")
        or number(after(_MPI), "-n", "-np", "--n", "--np", "--ntasks")
        or (number(command, "--nproc-per-node", "--num-processes") if search_all_words else 0)
        or None
    )


def _names_launcher(word: str, launchers: Sequence[str]) -> bool:
    """Whether ``word`` names one of ``launchers``: as a program, a module, or a module's file."""
    dotted = word.replace("/", ".")
    return basename(word) in launchers or any(dotted.endswith(f".{each}.py") for each in launchers)


def _end_of_launchers(command: Sequence[str]) -> int:
    """Index of the word with which the launchers' own words end: the script that they start, or the ``-m`` before a module. The length of
    the command if there is neither."""
    for at, (word, following) in enumerate(pairwise((*command, ""))):
        is_module = word in ("-m", "--module") and not following.startswith("-")
        started = following if is_module else word if word.endswith(".py") else None
        if started is not None and not _names_launcher(started, _LAUNCHERS):
            return at
    return len(command)
