"""What was tried: a table of measured changes, beside what was expected of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpdoctor.diagnose.tried import Answer, Variant
from ddpdoctor.plain import plain
from ddpdoctor.report import words

STYLES = {"faster": "green", "slower": "red", "failed": "bold red", "not applied": "yellow"}
_UNDECIDED = "cannot be told yet"


class Proposed(Protocol):
    """A change that could be tried."""

    @property
    def words(self) -> str:
        """Its settings."""

    @property
    def title(self) -> str:
        """What it does, in words."""

    @property
    def finding(self) -> str | None:
        """Rule that suggests it."""

    @property
    def expected_share(self) -> float | None:
        """What of the step is left, as far as anybody said."""


def print_proposals(proposals: Sequence[Proposed], echo: Callable[[str], None]) -> None:
    """What could be tried, and what each is expected to bring."""
    if not proposals:
        echo("Nothing that the findings suggest can be tried from outside of the script.")
        return
    for proposal in proposals:
        expected = (
            ""
            if proposal.expected_share is None
            else f"  (expected: {proposal.expected_share:.0%} of the step time)"
        )
        echo(f"{proposal.words}{expected}")
        if proposal.finding:
            echo(f"    {plain(proposal.finding)}: {plain(proposal.title)}")
    echo("To measure them: ddpdoctor try RUN --all -- COMMAND")


def shown_settings(variant: Variant) -> str:
    """As the command line takes them."""
    values = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in variant.settings.items()
    }
    return plain(" ".join(f"{name}={value}" for name, value in values.items()))


def shown_verdict(variant: Variant) -> str:
    """The verdict, with its size where there is one."""
    if variant.verdict in ("faster", "slower") and variant.change is not None:
        return f"{variant.verdict}, {variant.change:+.0%}"
    return _UNDECIDED if variant.verdict == "same" and variant.why else variant.verdict


def remark(variant: Variant) -> str:
    """What else there is to say of a variant."""
    said = [variant.why]
    if variant.bound:
        said.append("imitated: this is the most that can be won, no job trains like that")
    if variant.kept_promise is False:
        said.append("not what was expected")
    if variant.verdict == "faster" and variant.parity is not None and variant.parity.same_bits is False:
        said.append(f"other bits in the parameters ({variant.results})")
    return plain("; ".join(part for part in said if part))


def milliseconds(middle: float | None, ends: Sequence[float] | None) -> str:
    """A step time with its interval."""
    if middle is None:
        return ""
    shown = words.significant(middle)
    return shown if ends is None else f"{shown} ({words.significant(ends[0])}–{words.significant(ends[1])})"


def print_answer(answer: Answer, console: Console) -> None:
    """The table, and the best change."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("change", overflow="fold")
    table.add_column("expected ms", justify="right", no_wrap=True)
    table.add_column("measured ms (95 %)", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    baseline = answer.baseline
    table.add_row("as it is", "", milliseconds(baseline.median_ms, baseline.interval_ms), "")
    for variant in answer.variants:
        expected = "" if variant.expected_ms is None else words.significant(variant.expected_ms)
        said = Text(shown_verdict(variant), style=STYLES.get(variant.verdict, ""))
        if remark(variant):
            said.append(f": {remark(variant)}", style="dim")
        table.add_row(
            shown_settings(variant), expected, milliseconds(variant.median_ms, variant.interval_ms), said
        )
    console.print(table)
    for note in [*baseline.failed[:1], *answer.notes]:
        console.print(Text(plain(note), style="dim"))
    best = answer.best()
    if best is not None and best.change is not None:
        console.print(
            Text(f"Best: {shown_settings(best)}, {1 / (1 + best.change):.2f} times as fast.", style="bold")
        )
