"""Bar charts: breakdown of the step time per rank, potential savings per step, and the wall time of the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, RankSummary, WaterfallBar
from ddpdoctor.measure.taxonomy import PARTS, Part
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import NEGLIGIBLE, Tick, nice_ticks, percent_of
from ddpdoctor.report.charts.series import event_line, event_steps, notable_ranks, run_event
from ddpdoctor.report.summary import goodput_formula

ROWS = 16
"""Maximum number of ranks with their own bars. If there are more, notable ranks have bars and the others are averaged."""


class Segment(msgspec.Struct, frozen=True):
    """A segment of a bar, in per cent of the longest bar."""

    part: str
    x: float
    width: float
    title: str


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The bars, their parts (for legend and table head), and notes."""

    bars: list[tuple[str, str, dict[str, float]]]
    """(label, detail, value by part): milliseconds per step, or shares of the step if :attr:`shares`."""
    parts: list[str]
    shares: bool
    notes: list[str]

    @property
    def rows(self) -> list[SimpleNamespace]:
        """The bars for the template: sum, segments, and a table cell per part, empty for parts that do not occur."""
        show = words.percent if self.shares else words.milliseconds
        totals = [sum(max(values.get(name, 0), 0) for name in self.parts) for _, _, values in self.bars]
        return [
            SimpleNamespace(
                label=label,
                detail=detail,
                total=show(total),
                segments=_segments(label, values, self.parts, max(totals), total),
                cells=[show(values[name]) if values.get(name, 0) > 0 else "" for name in self.parts],
            )
            for (label, detail, values), total in zip(self.bars, totals, strict=True)
        ]


def breakdown(diagnosis: Diagnosis) -> Breakdown | None:
    """One bar per rank; without breakdowns by rank, one bar of the critical path; None without either."""
    known = [
        rank for rank in diagnosis.ranks if any(value >= NEGLIGIBLE for value in rank.breakdown_ms.values())
    ]
    notes: list[str] = []
    if known:
        bars = _rank_bars(diagnosis, known, notes)
    elif any(value >= NEGLIGIBLE for value in diagnosis.breakdown.values()):
        bars = [("critical path", "", diagnosis.breakdown)]
    else:
        return None
    names = list(PARTS) + sorted({name for _, _, parts in bars for name in parts} - set(PARTS))
    parts = [name for name in names if any(values.get(name, 0) >= NEGLIGIBLE for _, _, values in bars)]
    if Part.COMM_TRANSFER in parts and not words.has_all_ranks(diagnosis):
        notes.append(
            "Not all ranks were recorded: transfer may include waiting for ranks without a recording."
        )
    return Breakdown(bars=bars, parts=parts, shares=not known, notes=notes)


def _rank_bars(
    diagnosis: Diagnosis, known: Sequence[RankSummary], notes: list[str]
) -> list[tuple[str, str, dict[str, float]]]:
    details = _rank_details(known)
    if len(known) <= ROWS:
        return [(f"rank {rank.rank}", details[rank.rank], rank.breakdown_ms) for rank in known]
    by_number = {rank.rank: rank for rank in known}
    shown = [by_number[number] for number in notable_ranks(diagnosis) if number in by_number][: ROWS // 2]
    others = [rank for rank in known if rank not in shown]
    keys = sorted({key for rank in others for key in rank.breakdown_ms})
    average = {key: sum(rank.breakdown_ms.get(key, 0.0) for rank in others) / len(others) for key in keys}
    notes.append(
        f"{len(known)} ranks: those named by findings and those that delay others most have their own bars; "
        f"the other {len(others)} are averaged."
    )
    bars = [(f"rank {rank.rank}", details[rank.rank], rank.breakdown_ms) for rank in shown]
    return [*bars, (f"{len(others)} others", "mean", average)]


def _rank_details(ranks: Sequence[RankSummary]) -> dict[int, str]:
    """Host and device by rank, if they differ between ranks."""
    hosts, devices = {rank.host for rank in ranks}, {rank.device for rank in ranks}
    details = [
        (rank, rank.host if len(hosts) > 1 else "", rank.device if len(devices) > 1 else "") for rank in ranks
    ]
    return {rank.rank: ", ".join(word for word in (host, device) if word) for rank, host, device in details}


def _segments(
    label: str, values: dict[str, float], parts: Sequence[str], longest: float, total: float
) -> list[Segment]:
    segments, x = [], 0.0
    for name in parts:
        value = values.get(name, 0.0)
        if value < NEGLIGIBLE:
            continue
        amount = words.percent(value / total)
        # If times are unknown, only the share is shown.
        text = (
            amount
            if total <= 1.0001 and label == "critical path"
            else f"{words.milliseconds(value)} ({amount})"
        )
        title = f"{label}: {words.part(name)} {text}"
        segments.append(Segment(name, percent_of(x, longest), percent_of(value, longest), title))
        x += value
    return segments


BARS = 48
"""Maximum number of savings with their own bar; the others share one."""

_SIGNS = {"saving": "−", "bound": "≤ "}


class WaterfallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A bar of the waterfall, in milliseconds for plotly and in per cent of the measured step time for the template."""

    label: str
    kind: str
    """"measured", "saving", "bound" (upper bound of a saving) or "goal"."""
    from_ms: float
    ms: float
    rule: str | None = None
    ends_ms: list[float] | None = None
    """90 % interval of the bar's lower end."""

    whole_ms: float
    """The measured step time."""

    @property
    def x(self) -> float:
        return percent_of(self.from_ms, self.whole_ms)

    @property
    def width(self) -> float:
        return percent_of(self.ms, self.whole_ms)

    @property
    def whisker(self) -> list[float]:
        return [percent_of(end_ms, self.whole_ms) for end_ms in self.ends_ms or ()]

    @property
    def value(self) -> str:
        return f"{_SIGNS.get(self.kind, '')}{words.milliseconds(self.ms)}"


def waterfall(diagnosis: Diagnosis) -> list[WaterfallRow]:
    """Bars from the measured step time through the savings to the remaining step time; [] if no saving is known."""
    bars = [bar for bar in diagnosis.waterfall if bar.ms == bar.ms]
    if len(bars) < 2 or bars[0].ms < NEGLIGIBLE:
        return []
    whole_ms = left_ms = bars[0].ms
    row = partial(WaterfallRow, whole_ms=whole_ms)
    rows = [row(label=bars[0].label, kind="measured", from_ms=0.0, ms=whole_ms)]
    last = bars[-1] if bars[-1].rule is None else None
    for bar in _with_rest_combined(bars[1 : len(bars) - (last is not None)]):
        saved_ms = min(abs(bar.ms), left_ms)
        ends_ms = bar.range_ms and [max(0.0, left_ms - end_ms) for end_ms in reversed(bar.range_ms)]
        left_ms -= saved_ms
        kind = "bound" if bar.at_most else "saving"
        rows.append(
            row(label=bar.label, kind=kind, from_ms=left_ms, ms=saved_ms, rule=bar.rule, ends_ms=ends_ms)
        )
    if len(rows) < 2:
        return []
    label = last.label if last else "without these, at best"
    goal_ms = min(last.ms, whole_ms) if last else left_ms
    return [*rows, row(label=label, kind="goal", from_ms=0.0, ms=goal_ms)]


def _with_rest_combined(savings: Sequence[WaterfallBar]) -> list[WaterfallBar]:
    more = savings[BARS:]
    rest = [WaterfallBar(f"{len(more):,} more", sum(abs(bar.ms) for bar in more))] if more else []
    return [*savings[:BARS], *rest]


def whole_run(diagnosis: Diagnosis) -> SimpleNamespace | None:
    """A bar of :func:`ddpdoctor.report.words.run_parts`, positions in per cent of the wall time; None without parts. Labels of segments
    are like "pauses 7.99 s (17 %): step 240, job39.py:5"."""
    parts_s = words.run_parts(diagnosis)
    if not parts_s:
        return None
    # The parts may sum to less, because small ones are omitted, or to more in an invalid file.
    wall_s = max(words.number_fact(diagnosis, "run.wall_s") or 0.0, sum(parts_s.values()))
    segments, x_s = [], 0.0
    for part, value in parts_s.items():
        text = f"{words.part(part, diagnosis)} {words.milliseconds(1e3 * value)} ({words.percent(value / wall_s)})"
        segments.append(
            SimpleNamespace(
                part=part,
                x=percent_of(x_s, wall_s),
                width=percent_of(value, wall_s),
                label=": ".join(filter(None, (text, part_detail(diagnosis, part)))),
            )
        )
        x_s += value
    unit_s = next((unit for unit in (3600.0, 60.0) if wall_s >= 4 * unit), 1.0)
    goodput = words.number_fact(diagnosis, "run.goodput")
    return SimpleNamespace(
        wall=words.seconds(wall_s),
        segments=segments,
        ticks=[
            Tick(percent_of(value, wall_s), words.strip_zeros(words.seconds(value)))
            for value in nice_ticks(wall_s, unit=unit_s)
        ],
        goodput="" if goodput is None else f"Goodput {words.percent(goodput)}: {goodput_formula(diagnosis)}.",
    )


def part_detail(diagnosis: Diagnosis, part: str) -> str:
    """Steps and source line of single pauses, line of periodic steps: "step 240, train.py:5"; empty for other parts."""
    name = {"pauses": "pause", "some_steps": "periodic"}.get(part)
    event = run_event(diagnosis, name) if name else None
    if event is None:
        return ""
    # The label of periodic steps has their period.
    steps = "" if name == "periodic" and event.every else event_steps(event)
    return ", ".join(filter(None, (steps, event_line(event))))
