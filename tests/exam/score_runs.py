"""Compares the diagnosis of a whole run with the records of the job and its processes.

**Work at certain times.** For each planted work, these are marked: whether a finding reports it (of the family ``run`` with this kind of
work or an unknown one, or one whose page describes it or that names its line), the ranks, the line, the time (first and last step within
2 % of the run, n exact), its seconds within a fifth, and that no finding reports it as a cost of every step unless it is. For each run:
whether its account adds up to the launcher's time within 1 %, and that no other pattern is reported (silence).

**Restarts.** For each job, these are marked: the number of attempts; what ended each (rank, kind, exit code); the number of repeated
steps, exact; the seconds of these steps, of the detection and of the next start, within a third; the command's exit code; whether the
job failed and by which rank; and that no restart is reported of a job without one, and no other warning (silence).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from .planted import Case, Fault, When
from .score import Answers, Mark, first_line, summary

STEPS_TOLERANCE, SECONDS_TOLERANCE, ACCOUNT_TOLERANCE = 0.02, 0.2, 0.01
NO_PARTS = ("wall_s", "joining_s", "exit_s")
"""Durations in the facts of a run that are not parts of it: the whole, and durations contained in a part."""
EVENTS = {
    "run/pause": "pause",
    "run/every-nth-step": "periodic",
    "run/step-time-changed": "change",
    "run/steps-get-longer": "growth",
}


@dataclasses.dataclass(frozen=True)
class Reported:
    """What a finding reports about the time of its work; None for what it does not report."""

    finding: dict[str, Any]
    how: str
    work: str | None = None
    steps: tuple[int, ...] = ()
    every: int | None = None
    seconds: float | None = None

    @property
    def is_pattern(self) -> bool:
        return self.finding["rule"] in EVENTS

    def __str__(self) -> str:
        of = f" of {self.work}" if self.work else ""
        every = f", every {self.every}" if self.every else ""
        ends = f" in {self.steps[0]} to {self.steps[-1]}" if self.steps else ""
        return f"{summary(self.finding)}: {self.how}{of}{ends}{every}, {self.seconds or 0:.2f} s"


def mark_when(case: Case, diagnosis: dict[str, Any]) -> Mark:
    """The marks of a diagnosis of a run with planted work at known times."""
    every_rank = set(diagnosis["job"]["ranks_seen"])
    reported = [_reported(finding, diagnosis) for finding in diagnosis["findings"]]
    answers = Answers()
    ask = answers.ask

    explained: list[Reported] = []
    for fault in case.faults:
        if fault.when is None:
            continue
        matching = [each for each in reported if _reports(each, fault, fault.when)]
        with_right_ranks = [
            each for each in matching if _ranks(each, every_rank) == set(fault.ranks or every_rank)
        ]
        with_right_steps = [each for each in matching if _has_right_steps(each, fault.when)]
        explained += with_right_steps or matching
        truth = f"{fault.kind} of {fault.ranks} {fault.when}"
        ask("rule", bool(matching), f"{truth} not reported")
        if matching:
            ask(
                "rank",
                bool(with_right_ranks),
                f"{truth} reported of {[each.finding['ranks'] for each in matching]}",
            )
        if with_right_ranks:
            lines = [
                first_line(each.finding)
                for each in with_right_ranks
                if each in with_right_steps or not with_right_steps
            ]
            ask(
                "line",
                any(line in fault.lines for line in lines),
                f"{truth} at {fault.lines}, reported at {lines}",
            )
        ask("when", bool(with_right_steps), f"{truth} reported as {[str(each) for each in matching]}")
        if with_right_steps:
            least, most = fault.when.seconds
            is_near = any(
                (1 - SECONDS_TOLERANCE) * least <= each.seconds <= (1 + SECONDS_TOLERANCE) * most
                for each in with_right_steps
                if each.seconds is not None
            )
            ask("seconds", is_near, f"{truth}, told {[each.seconds for each in with_right_steps]}")
        if fault.when.how not in ("always", "growing"):
            at_line = [each for each in reported if first_line(each.finding) in fault.lines]
            rates = [str(each) for each in at_line if each.how == "always"]
            ask("rate", not rates, f"{truth}, told as a cost of every step: {rates}")
    unexpected = [str(each) for each in reported if each.is_pattern and each not in explained]
    ask("silence", not unexpected, f"also a pattern: {unexpected}")
    parts_s, wall_s = _account(diagnosis)
    ask("account", abs(parts_s - wall_s) < ACCOUNT_TOLERANCE * wall_s, f"{parts_s:.2f} s of {wall_s:.2f} s")
    kinds = tuple(fault.when.how for fault in case.faults if fault.when)
    said = tuple(str(each) for each in reported)
    return Mark(case.seed, case.half, kinds, *answers.as_fields(), case.doubts, said)


def _reported(finding: dict[str, Any], diagnosis: dict[str, Any]) -> Reported:
    """The time of the finding's work."""
    cost_ms, steps = finding["costs_ms_per_step"], diagnosis["steps"]["count"]
    if finding["rule"] not in EVENTS:
        seconds = None if cost_ms is None else cost_ms * steps / 1e3
        how = finding["persistence"] or "unknown"
        every = re.search(r"every (\d+) steps", finding["explanation"])
        ends = tuple(finding["steps"] or ((0, steps - 1) if how == "always" else ()))
        return Reported(
            finding, how, None, ends, int(every[1]) if every and how == "periodic" else None, seconds
        )
    event = diagnosis["facts"]["run"][EVENTS[finding["rule"]]]
    ends = tuple(event["steps"])
    how = {"pause": "pause", "periodic": "periodic", "change": "range", "growth": "growing"}[
        EVENTS[finding["rule"]]
    ]
    if how == "range":
        slower = event["after_ms"] >= event["before_ms"]
        ends = (ends[0], steps - 1) if slower else (0, ends[0] - 1)  # as the finding words it
    return Reported(finding, how, event["kind"], ends, event["every"], event["total_s"])


def _reports(reported: Reported, fault: Fault, when: When) -> bool:
    """Whether the finding reports the planted work, regardless of the time."""
    if reported.is_pattern:
        return reported.work in (when.work, None)
    return reported.finding["rule"] in fault.rules or first_line(reported.finding) in fault.lines


def _ranks(reported: Reported, every_rank: set[int]) -> set[int]:
    return every_rank if reported.finding["ranks"] is None else set(reported.finding["ranks"])


HOW = {"every n-th": "periodic", "since": "range", "until": "range", "once": "pause", "twice": "pause"}


def _has_right_steps(reported: Reported, when: When) -> bool:
    """Whether the finding reports the right steps. The first and last step of a period may be off by one period."""
    if reported.how != HOW.get(when.how, when.how) or reported.every != when.every or not reported.steps:
        return False
    near = max(STEPS_TOLERANCE * when.total, when.every or 0)
    ends = reported.steps if when.how in ("once", "twice") else (reported.steps[0], reported.steps[-1])
    return len(ends) == len(when.steps) and all(
        abs(one - other) <= near for one, other in zip(ends, when.steps, strict=True)
    )


def _account(diagnosis: dict[str, Any]) -> tuple[float, float]:
    """(Sum of all parts, time from the launcher's start to its end), s."""
    run = diagnosis["facts"]["run"]
    parts_s = sum(part or 0.0 for name, part in run.items() if name.endswith("_s") and name not in NO_PARTS)
    return parts_s, diagnosis["job"]["duration_s"]


RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE_S = 1 / 3, 0.25
"""Relative tolerance of the seconds, and their absolute tolerance, from the polling intervals of the job and the launcher."""
WORDS = {
    "raise": "raised RuntimeError: planted",
    "kill": "ended by SIGKILL",
    "abort": "ended by SIGABRT",
    "hang": "did not reach the point where the others waited",
    "lock": "did not reach the point where the others waited",
}
TOLERATED = ("host/outside-work", "sync/explicit-barrier")
"""The job sleeps most of the time in its steps, and has a barrier after each checkpoint."""


def mark_restarts(case: Case, diagnosis: dict[str, Any]) -> Mark:
    """The marks of a diagnosis of a job with known attempts."""
    answers, truth = Answers(), case.shape
    ask, run, findings = answers.ask, diagnosis["facts"]["run"], diagnosis["findings"]
    attempts = run.get("attempts") or []
    counted, restarts = max(len(attempts), 1), run.get("restarts")
    ask("attempts", counted == truth["attempts"], f"{truth['attempts']} attempts, {counted} told")
    again = (restarts or {}).get("count", 0)
    ask("attempts", again == truth["restarts"], f"{truth['restarts']} restarts, {again} told")
    last = len(truth["ends"]) - 1
    for number, end in enumerate(truth["ends"]):
        if end and number < last and len(attempts) == truth["attempts"]:
            expected, reported = _end_text(end), attempts[number]
            right = reported["ended"].endswith(expected) and reported["ranks"] == sorted(end["ranks"])
            words = f"attempt {number + 1}: {end['ranks']} {expected}; told {reported['ranks']} {reported['ended']}"
            ask("cause", right, words)
    if last > 0:
        ask("rule", restarts is not None, "no restart reported")
    if last > 0 and restarts is not None:
        _ask_costs(answers, truth, restarts)
    code = diagnosis["job"].get("exit_code")
    ask("exit", code == truth["exit"], f"exit code {truth['exit']}, told {code}")
    stopped = [each for each in findings if each["rule"].startswith("hang/")]
    if truth["ends"][last]:
        reported = [each["ranks"] for each in stopped]
        ask(
            "exit",
            sorted(truth["ends"][last]["ranks"]) in reported[:1],
            f"failed by {truth['ends'][last]}, told of {reported}",
        )
    else:
        ask("exit", not stopped, f"ended well, told {[summary(each) for each in stopped]}")
    unexpected = [
        summary(each)
        for each in findings
        if each["severity"] != "info"
        and each["rule"] not in TOLERATED
        and not (each["rule"] == "run/restarts" and last > 0)
        and each not in stopped
    ]
    ask("silence", not unexpected, f"also {unexpected}")
    said = tuple(summary(each) for each in findings)
    kinds = tuple(fault.kind for fault in case.faults)
    return Mark(case.seed, case.half, kinds, *answers.as_fields(), case.doubts, said)


def _end_text(end: dict[str, Any]) -> str:
    if end["how"] != "code":
        return WORDS[end["how"]]
    return f"ended with exit code {end['code']}" if end["code"] else "exited before the others (exit code 0)"


def _ask_costs(answers: Answers, truth: dict[str, Any], restarts: dict[str, Any]) -> None:
    costs = truth["costs"]
    steps = costs["repeated_steps"] if truth["every"] else None
    reported = restarts["repeated_steps"]
    answers.ask("repeated", reported == steps, f"{steps} steps done again, told {reported}")
    for name in ("repeated_s", "detection_s", "start_s"):
        if name == "repeated_s" and steps is None:
            continue
        second, told_s = costs[name], restarts[name]
        near = told_s is not None and abs(told_s - second) <= max(
            RELATIVE_TOLERANCE * second, ABSOLUTE_TOLERANCE_S
        )
        answers.ask("seconds", near, f"{name} {second:.2f}, told {told_s}")
