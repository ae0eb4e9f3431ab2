"""What was tried: a table of measured changes, beside what was expected of each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import rich.table
from rich.console import Console
from rich.text import Text

from ddpdoctor.diagnose.trials import TrialsReport, Variant
from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.console_output import print_wrapped
from ddpdoctor.report.job_view import Table

STYLES = {"faster": "green", "slower": "red", "failed": "bold red", "not applied": "yellow"}
TITLE = "Tried on the job itself"
_UNDECIDED = "not decided yet"
_LOSSES_SHOWN, _LOSSES_OF = 8, 6
"""Rows, and changes beside the job as it is."""


class ExperimentView(msgspec.Struct, frozen=True, kw_only=True):
    """The table of what was tried."""

    baseline: str
    table: Table
    """Of each variant: the change, expected and measured ms, and the verdict with what else there is to say."""
    best: str
    notes: list[str]
    losses: Table | None = None
    """Of some backward passes from the first to the last, of the job as it is and of each change; None where none were seen."""


def experiment_view(answer: TrialsReport) -> ExperimentView:
    """What the reports show of it."""
    baseline = answer.baseline
    rows = [
        [
            settings_text(variant),
            _expected(variant, variant.baseline_mean_ms or baseline.median_ms),
            "" if variant.verdict == "not applied" else milliseconds(variant.median_ms, variant.interval_ms),
            ": ".join(part for part in (verdict_text(variant), note_text(variant)) if part),
        ]
        for variant in answer.variants
    ]
    return ExperimentView(
        baseline=milliseconds(baseline.median_ms, baseline.interval_ms),
        table=Table("What was tried", ["change", "expected ms", "measured ms (95 %)", "verdict"], rows),
        best=_best(answer),
        notes=[plain(note) for note in (*baseline.failed[:1], *answer.notes)],
        losses=_losses(answer),
    )


def _expected(variant: Variant, unchanged_ms: float | None) -> str:
    """What was expected, a bound as such: where the change may also bring nothing."""
    ends = variant.expected_range_ms
    if variant.expected_ms is None:
        return ""
    if ends and unchanged_ms is not None and ends[1] >= unchanged_ms:
        return f"≥ {words.significant(ends[0])}"
    return words.significant(variant.expected_ms)


def _losses(answer: TrialsReport) -> Table | None:
    """Side by side: whether a change trains on as the job does shows there first."""
    trains = [each for each in answer.variants if not each.bound]
    seen = [(each, each.parity.losses) for each in trains if each.parity and each.parity.losses][:_LOSSES_OF]
    if not seen:
        return None
    count = min(len(pairs) for _, pairs in seen)
    chosen = sorted({round(part * (count - 1) / (_LOSSES_SHOWN - 1)) for part in range(_LOSSES_SHOWN)})
    rows = [
        [str(number + 1), _loss(seen[0][1][number][:1]), *(_loss(pairs[number][1:]) for _, pairs in seen)]
        for number in chosen
    ]
    head = ["backward", "unchanged", *(settings_text(variant) for variant, _ in seen)]
    return Table("Losses of rank 0", head, rows)


def _loss(value: Sequence[float | None]) -> str:
    return "" if not value or value[0] is None else f"{value[0]:.6g}"


def settings_text(variant: Variant) -> str:
    """As the command line takes them."""
    values = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in variant.settings.items()
    }
    return plain(" ".join(f"{name}={value}" for name, value in values.items()))


def verdict_text(variant: Variant) -> str:
    """The verdict, with its size where there is one."""
    if variant.verdict in ("faster", "slower") and variant.change is not None:
        return f"{variant.verdict}, {variant.change:+.0%}"
    if variant.verdict == "not applied" and not variant.trials:
        return "not measured"
    return _UNDECIDED if variant.verdict == "same" and variant.why else plain(variant.verdict)


def note_text(variant: Variant) -> str:
    """What else there is to say of a variant."""
    said = [variant.why]
    if variant.baseline_mean_ms is not None and variant.median_ms is not None:
        said.append(f"means of all steps, {words.significant(variant.baseline_mean_ms)} ms unchanged")
    if variant.bound:
        said.append("simulated: the most a fix could gain; no job can train like this")
    if variant.prediction_held is False:
        said.append("not what was expected")
    said.append(_results_told(variant))
    return plain("; ".join(part for part in said if part))


def _results_told(variant: Variant) -> str:
    """What becomes of results with a change that is worth making, and of others where more changes than the setting says."""
    parity = variant.parity
    if parity is None or not parity.says or variant.bound:
        return ""
    if not parity.unexpected and variant.verdict != "faster":
        return ""
    return parity.says[:1].lower() + parity.says[1:].rstrip(".")


def milliseconds(middle: float | None, ends: Sequence[float] | None) -> str:
    """A step time with its interval."""
    if middle is None:
        return ""
    shown = words.significant(middle)
    return shown if ends is None else f"{shown} ({words.significant(ends[0])}–{words.significant(ends[1])})"


def print_experiment(answer: TrialsReport, console: Console) -> None:
    """The table, what else there is to say of each change in lines of its own, which a column would squeeze, and the best change."""
    view = experiment_view(answer)
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(view.table.head):
        right = number in (1, 2)
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    table.add_row("unchanged", "", view.baseline, "")
    for row, variant in zip(view.table.rows, answer.variants, strict=True):
        table.add_row(
            *map(Text, row[:-1]), Text(verdict_text(variant), style=STYLES.get(variant.verdict, ""))
        )
    print_wrapped(console, table)
    remarks = [f"{settings_text(each)}: {said}" for each in answer.variants if (said := note_text(each))]
    for line in (*remarks, *view.notes):
        print_wrapped(console, Text(line, style="dim"))
    if view.best:
        print_wrapped(console, Text(view.best, style="bold"))


def _best(answer: TrialsReport) -> str:
    best = answer.best()
    if best is None or best.change is None:
        return ""
    return f"Best: {settings_text(best)}, {1 / (1 + best.change):.2f} times as fast."
