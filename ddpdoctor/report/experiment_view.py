"""Formats the results of ``ddpdoctor try``: expected and measured step time of each change."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from rich.console import Console
from rich.text import Text

from ddpdoctor.diagnose.trials import TrialsReport, Variant
from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.console_output import plain_table, print_line, print_wrapped
from ddpdoctor.report.job_view import Table

STYLES = {"faster": "green", "slower": "red", "failed": "bold red", "not applied": "yellow"}
TITLE = "Measured with ddpdoctor try"
_UNDECIDED = "not decided yet"
_LOSS_ROWS, _LOSS_VARIANTS = 8, 6
"""Maximum numbers of backward passes and of changes in the table of losses."""


def experiment_view(results: TrialsReport) -> SimpleNamespace:
    """The texts of ``results`` for terminal, HTML and Markdown.

    The table has a row per variant: the change, expected and measured ms per step, and the verdict with its notes. A second table,
    None without recorded losses, has the losses of some backward passes in the unchanged job and with each change.
    """
    baseline = results.baseline
    rows = [
        [
            settings_text(variant),
            _expected_text(variant, variant.baseline_mean_ms or baseline.median_ms),
            "" if variant.verdict == "not applied" else milliseconds(variant.median_ms, variant.interval_ms),
            ": ".join(part for part in (verdict_text(variant), note_text(variant)) if part),
        ]
        for variant in results.variants
    ]
    return SimpleNamespace(
        baseline=milliseconds(baseline.median_ms, baseline.interval_ms),
        table=Table("What was tried", ["change", "expected ms", "measured ms (95 %)", "verdict"], rows),
        best=_best_sentence(results),
        notes=[plain(note) for note in (*baseline.failed[:1], *results.notes)],
        losses=_losses_table(results),
    )


def _expected_text(variant: Variant, unchanged_ms: float | None) -> str:
    """The expected step time in ms; "≥" and its lower bound if the change may save nothing."""
    ends = variant.expected_range_ms
    if variant.expected_ms is None:
        return ""
    if ends and unchanged_ms is not None and ends[1] >= unchanged_ms:
        return f"≥ {words.significant(ends[0])}"
    return words.significant(variant.expected_ms)


def _losses_table(results: TrialsReport) -> Table | None:
    """Losses of the unchanged job and with each change, which show whether the training differs."""
    without_bounds = [each for each in results.variants if not each.bound]
    with_losses = [
        (each, each.parity.losses) for each in without_bounds if each.parity and each.parity.losses
    ]
    with_losses = with_losses[:_LOSS_VARIANTS]
    if not with_losses:
        return None
    count = min(len(pairs) for _, pairs in with_losses)
    chosen = sorted({round(part * (count - 1) / (_LOSS_ROWS - 1)) for part in range(_LOSS_ROWS)})
    rows = [
        [
            str(number + 1),
            _loss(with_losses[0][1][number][:1]),
            *(_loss(pairs[number][1:]) for _, pairs in with_losses),
        ]
        for number in chosen
    ]
    head = ["backward", "unchanged", *(settings_text(variant) for variant, _ in with_losses)]
    return Table("Losses of rank 0", head, rows)


def _loss(value: Sequence[float | None]) -> str:
    return "" if not value or value[0] is None else f"{value[0]:.6g}"


def settings_text(variant: Variant) -> str:
    """The settings in the format of ``--set``: "loader.num_workers=4"."""
    values = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in variant.settings.items()
    }
    return plain(" ".join(f"{name}={value}" for name, value in values.items()))


def verdict_text(variant: Variant) -> str:
    """The verdict, with the change in per cent if there is one: "faster, -12%"."""
    if variant.verdict in ("faster", "slower") and variant.change is not None:
        return f"{variant.verdict}, {variant.change:+.0%}"
    if variant.verdict == "not applied" and not variant.trials:
        return "not measured"
    if variant.verdict == "same" and variant.why:
        return _UNDECIDED if variant.change is None else f"{variant.change:+.0%} so far, {_UNDECIDED}"
    return plain(variant.verdict)


def note_text(variant: Variant) -> str:
    """The notes on a variant: reason of the verdict, method, limits, and effect on the training results."""
    notes = [variant.why]
    if variant.baseline_mean_ms is not None and variant.median_ms is not None:
        notes.append(
            f"compared by the mean of all steps ({words.significant(variant.baseline_mean_ms)} ms unchanged)"
        )
    if variant.bound:
        notes.append("simulated upper bound of what a fix can gain; a job cannot train with it")
    if variant.prediction_held is False:
        notes.append("outside the expected range")
    notes.append(_results_note(variant))
    return plain("; ".join(part for part in notes if part))


def _results_note(variant: Variant) -> str:
    """The comparison of the training results, for faster changes and for unexpected differences; else ""."""
    parity = variant.parity
    if parity is None or not parity.says or variant.bound:
        return ""
    if not parity.unexpected and variant.verdict != "faster":
        return ""
    return parity.says[:1].lower() + parity.says[1:].rstrip(".")


def milliseconds(middle: float | None, ends: Sequence[float] | None) -> str:
    """A step time in ms with its interval: "16.2 (15.9–16.5)"."""
    if middle is None:
        return ""
    shown = words.significant(middle)
    return shown if ends is None else f"{shown} ({words.significant(ends[0])}–{words.significant(ends[1])})"


def print_experiment(results: TrialsReport, console: Console) -> None:
    """Print the table, the notes on each change, and the best change."""
    view = experiment_view(results)
    table = plain_table()
    for number, name in enumerate(view.table.head):
        right = number in (1, 2)
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    table.add_row("unchanged", "", view.baseline, "")
    for row, variant in zip(view.table.rows, results.variants, strict=True):
        table.add_row(
            *map(Text, row[:-1]), Text(verdict_text(variant), style=STYLES.get(variant.verdict, ""))
        )
    print_wrapped(console, table)
    variant_notes = [
        f"{settings_text(each)}: {notes}" for each in results.variants if (notes := note_text(each))
    ]
    for line in (*variant_notes, *view.notes):
        print_line(console, line, "dim")
    if view.best:
        print_line(console, view.best, "bold")


def _best_sentence(results: TrialsReport) -> str:
    best = results.best()
    if best is None or best.change is None:
        return ""
    return f"Best: {settings_text(best)}, {1 / (1 + best.change):.2f} times as fast."
