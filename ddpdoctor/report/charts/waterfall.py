"""From the measured step time to what it could be."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, WaterfallBar
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import LEAST, percent_of

BARS = 48
"""Most savings with a bar of their own; cheaper ones share one."""


class WaterfallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A bar: a total at both ends, a saving between them. Positions in per cent of the measured step time."""

    label: str
    kind: str
    """"measured", "saving" or "goal"."""
    x: float
    width: float
    value: str
    rule: str | None = None
    whisker: tuple[float, float] | None = None
    """From where to where the saving's end may lie, nine times in ten."""


class WaterfallData(msgspec.Struct, frozen=True, kw_only=True):
    """A bar in milliseconds, whoever draws it."""

    label: str
    kind: str
    """"measured", "saving" or "goal"."""
    from_ms: float
    ms: float
    rule: str | None = None
    ends_ms: list[float] | None = None
    """From where to where the saving's end may lie, nine times in ten."""

    @property
    def value(self) -> str:
        return f"{'−' if self.kind == 'saving' else ''}{words.milliseconds(self.ms)}"


def waterfall_data(diagnosis: Diagnosis) -> list[WaterfallData]:
    """Bars from the measured time downwards; empty where no saving is known.

    The first bar is the measured step time, bars with a rule (and those between two totals) are
    savings, a last bar without a rule is what is left.
    """
    bars = [bar for bar in diagnosis.waterfall if bar.ms == bar.ms]
    if len(bars) < 2 or bars[0].ms < LEAST:
        return []
    whole = left = bars[0].ms
    falls = [WaterfallData(label=bars[0].label, kind="measured", from_ms=0.0, ms=whole)]
    last = bars[-1] if bars[-1].rule is None else None
    for bar in _few(bars[1 : len(bars) - (last is not None)]):
        saved = min(abs(bar.ms), left)
        ends_ms = bar.range_ms and [max(0.0, left - end_ms) for end_ms in reversed(bar.range_ms)]
        left -= saved
        falls.append(
            WaterfallData(
                label=bar.label, kind="saving", from_ms=left, ms=saved, rule=bar.rule, ends_ms=ends_ms
            )
        )
    if len(falls) < 2:
        return []
    goal_ms = min(last.ms, whole) if last else left
    return [
        *falls,
        WaterfallData(label=last.label if last else "could be", kind="goal", from_ms=0.0, ms=goal_ms),
    ]


def _few(savings: Sequence[WaterfallBar]) -> list[WaterfallBar]:
    more = savings[BARS:]
    rest = [WaterfallBar(f"{len(more):,} more", sum(abs(bar.ms) for bar in more))] if more else []
    return [*savings[:BARS], *rest]


def waterfall(diagnosis: Diagnosis) -> list[WaterfallRow]:
    """The rows of :func:`waterfall_data`."""
    falls = waterfall_data(diagnosis)
    return [
        WaterfallRow(
            label=fall.label,
            kind=fall.kind,
            x=percent_of(fall.from_ms, falls[0].ms),
            width=percent_of(fall.ms, falls[0].ms),
            value=fall.value,
            rule=fall.rule,
            whisker=None
            if not fall.ends_ms
            else (percent_of(fall.ends_ms[0], falls[0].ms), percent_of(fall.ends_ms[1], falls[0].ms)),
        )
        for fall in falls
    ]
