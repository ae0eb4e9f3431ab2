"""Compares what a diagnosis says of a restarted job with what the job and its processes showed.

Asked of each job: how many attempts; what ended each (rank, kind, exit code); the steps done again, exact; the seconds of them, of the
detection and of the next start, within a third; the command's exit code, and whether the job failed and by which rank; and silence, that
is, no restart of a job without one, and no other warning.
"""

from __future__ import annotations

from typing import Any

from .planted import Case
from .score import Answers, Mark, summary

PART, LEAST_S = 1 / 3, 0.25
"""Of the seconds; what the looks for ended processes and the launcher's own may differ by."""
WORDS = {
    "raise": "raised RuntimeError: planted",
    "kill": "ended by SIGKILL",
    "abort": "ended by SIGABRT",
    "hang": "did not reach the point where the others waited",
    "lock": "did not reach the point where the others waited",
}
TOLERATED = ("host/outside-work", "sync/explicit-barrier")
"""The job sleeps for the most part of its steps, and has a barrier after each checkpoint."""


def mark_restarts(case: Case, diagnosis: dict[str, Any]) -> Mark:
    """Marks one diagnosis of a job with known attempts."""
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
            expected, told = _words(end), attempts[number]
            right = told["ended"].endswith(expected) and told["ranks"] == sorted(end["ranks"])
            words = f"attempt {number + 1}: {end['ranks']} {expected}; told {told['ranks']} {told['ended']}"
            ask("cause", right, words)
    if last > 0:
        ask("rule", restarts is not None, "no restart reported")
    if last > 0 and restarts is not None:
        _ask_costs(answers, truth, restarts)
    code = diagnosis["job"].get("exit_code")
    ask("exit", code == truth["exit"], f"exit code {truth['exit']}, told {code}")
    stopped = [each for each in findings if each["rule"].startswith("hang/")]
    if truth["ends"][last]:
        told = [each["ranks"] for each in stopped]
        ask(
            "exit",
            sorted(truth["ends"][last]["ranks"]) in told[:1],
            f"failed by {truth['ends'][last]}, told of {told}",
        )
    else:
        ask("exit", not stopped, f"ended well, told {[summary(each) for each in stopped]}")
    extra = [
        summary(each)
        for each in findings
        if each["severity"] != "info"
        and each["rule"] not in TOLERATED
        and not (each["rule"] == "run/restarts" and last > 0)
        and each not in stopped
    ]
    ask("silence", not extra, f"also {extra}")
    said = tuple(summary(each) for each in findings)
    kinds = tuple(fault.kind for fault in case.faults)
    return Mark(case.seed, case.half, kinds, *answers.as_fields(), case.doubts, said)


def _words(end: dict[str, Any]) -> str:
    if end["how"] != "code":
        return WORDS[end["how"]]
    return f"ended with exit code {end['code']}" if end["code"] else "exited before the others (exit code 0)"


def _ask_costs(answers: Answers, truth: dict[str, Any], restarts: dict[str, Any]) -> None:
    costs = truth["costs"]
    steps = costs["repeated_steps"] if truth["every"] else None
    told = restarts["repeated_steps"]
    answers.ask("repeated", told == steps, f"{steps} steps done again, told {told}")
    for name in ("repeated_s", "detection_s", "start_s"):
        if name == "repeated_s" and steps is None:
            continue
        second, told_s = costs[name], restarts[name]
        near = told_s is not None and abs(told_s - second) <= max(PART * second, LEAST_S)
        answers.ask("seconds", near, f"{name} {second:.2f}, told {told_s}")
