"""The lab's tables, as plain text."""

from __future__ import annotations

from .trial import Outcome

_ROW = "{:<4} {:<26} {:<24} {:<34} {:<34} {:<5} {:<8} {:>17} {:>5}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def print_header() -> None:
    print(_ROW.format("", "case", "job", "expected", "got", "rank", "line", "said/true of step", "load"))


def print_row(outcome: Outcome) -> None:
    """One line for a case, and its false alarms."""
    case, judged = outcome.case, outcome.judgement
    job = f"{case.job.script} {case.job.ranks}x{case.job.step_ms:g}ms"
    expected = (outcome.expected.rules or ("healthy",))[0]
    culprit = outcome.expected.ranks
    expected += f" {culprit}" if culprit else ""
    if judged is None:
        print(f"ERR  {case.name:<26} {job:<24} {outcome.error}", flush=True)
        return
    mark = "ok" if judged.right else "BAD"
    if not outcome.counts:
        mark = "(" + mark + ")"
    cost = f"{_ms(judged.predicted_ms)}/{_ms(outcome.truth_ms)} of {_ms(outcome.step_ms)}"
    rank = "-" if judged.rank is None else "ok" if judged.rank else "BAD"
    got = judged.got or "healthy"
    print(
        _ROW.format(mark, case.name, job, expected, got, rank, judged.line, cost, f"{outcome.load:.1f}"),
        flush=True,
    )
    if judged.false_alarms:
        print(f"{'':5}beside it: {', '.join(judged.false_alarms)}", flush=True)


def print_summary(outcomes: list[Outcome], seconds: float) -> None:
    """Totals, the confusion between rules, and what failed."""
    counted = [o for o in outcomes if o.counts and o.judgement]
    print(f"\n{len(counted)} cases counted of {len(outcomes)}, in {seconds / 60:.0f} min")
    for size in ("mild", "strong", "healthy"):
        of_size = [o for o in counted if o.case.size == size]
        right = sum(o.judgement.right for o in of_size if o.judgement)
        alarms = sum(bool(o.judgement.false_alarms) for o in of_size if o.judgement)
        if of_size:
            print(
                f"  {size:<8} {right} of {len(of_size)} right ({right / len(of_size):.0%}); {alarms} with false alarms"
            )
    confused: dict[tuple[str, str], int] = {}
    for outcome in counted:
        assert outcome.judgement
        if not outcome.judgement.rule:
            key = ((outcome.expected.rules or ("healthy",))[0], outcome.judgement.got or "healthy")
            confused[key] = confused.get(key, 0) + 1
    for (expected, got), count in sorted(confused.items()):
        print(f"  {count} x {expected} taken for {got}")
    failed = [o for o in outcomes if o.judgement is None or (o.counts and not o.judgement.right)]
    for outcome in failed:
        print(f"\n{outcome.case.name}: {outcome.folder}")
        if outcome.judgement is None:
            print(f"  {outcome.error}")
            continue
        print(f"  said: {outcome.judgement.headline}")
        if outcome.judgement.where:
            print(f"  at: {'; '.join(outcome.judgement.where[:3])}")
