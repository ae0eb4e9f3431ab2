"""Where a step's time goes, one stacked bar per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, RankSummary
from ddpdoctor.measure.taxonomy import PARTS, Part
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import LEAST, percent_of
from ddpdoctor.report.charts.step_times import notable_ranks

ROWS = 16
"""Most ranks with their own bars; if there are more, the others are averaged into one."""


class Segment(msgspec.Struct, frozen=True):
    """A piece of a bar, in per cent of the longest bar."""

    part: str
    x: float
    width: float
    title: str


class BreakdownRow(msgspec.Struct, frozen=True, kw_only=True):
    """One bar and its numbers."""

    label: str
    detail: str
    total: str
    segments: list[Segment]
    cells: list[str]
    """One value per part in :attr:`Breakdown.parts`; empty where the part does not occur."""


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The bars, the parts that occur (for legend and table head), and what was averaged."""

    rows: list[BreakdownRow]
    parts: list[str]
    notes: list[str]


class BreakdownData(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the bars, for SVG and plotly."""

    bars: list[tuple[str, str, dict[str, float]]]
    """(label, detail, parts): milliseconds per step by part, or shares of the step. See :attr:`shares`."""
    parts: list[str]
    shares: bool
    notes: list[str]

    @property
    def show(self) -> Callable[[float], str]:
        return words.percent if self.shares else words.milliseconds


def breakdown_data(diagnosis: Diagnosis) -> BreakdownData | None:
    """One bar per rank; without breakdowns of ranks, one bar of the shares on the critical path; None if there is neither."""
    known = [rank for rank in diagnosis.ranks if any(value >= LEAST for value in rank.breakdown_ms.values())]
    notes: list[str] = []
    if known:
        bars = _rank_bars(diagnosis, known, notes)
    elif any(value >= LEAST for value in diagnosis.breakdown.values()):
        bars = [("critical path", "", diagnosis.breakdown)]
    else:
        return None
    names = list(PARTS) + sorted({name for _, _, parts in bars for name in parts} - set(PARTS))
    parts = [name for name in names if any(values.get(name, 0) >= LEAST for _, _, values in bars)]
    if Part.COMM_TRANSFER in parts and not words.is_whole(diagnosis):
        notes.append(
            "Not all ranks were recorded: transfer may include waiting for ranks without a recording."
        )
    return BreakdownData(bars=bars, parts=parts, shares=not known, notes=notes)


def breakdown(diagnosis: Diagnosis) -> Breakdown | None:
    """The bars of :func:`breakdown_data`."""
    data = breakdown_data(diagnosis)
    if data is None:
        return None
    bars, parts, show = data.bars, data.parts, data.show
    longest = max(sum(max(values.get(name, 0), 0) for name in parts) for _, _, values in bars)
    rows = []
    for label, detail, values in bars:
        total = sum(max(values.get(name, 0), 0) for name in parts)
        rows.append(
            BreakdownRow(
                label=label,
                detail=detail,
                total=show(total),
                segments=_segments(label, values, parts, longest, total),
                cells=[show(values[name]) if values.get(name, 0) > 0 else "" for name in parts],
            )
        )
    return Breakdown(rows=rows, parts=parts, notes=data.notes)


def _rank_bars(
    diagnosis: Diagnosis, known: Sequence[RankSummary], notes: list[str]
) -> list[tuple[str, str, dict[str, float]]]:
    details = _details(known)
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


def _details(ranks: Sequence[RankSummary]) -> dict[int, str]:
    """By rank: its host and device, if they differ between ranks."""
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
        if value < LEAST:
            continue
        amount = words.percent(value / total)
        # Without times only the share is shown.
        text = (
            amount
            if total <= 1.0001 and label == "critical path"
            else f"{words.milliseconds(value)} ({amount})"
        )
        title = f"{label}: {words.part(name)} {text}"
        segments.append(Segment(name, percent_of(x, longest), percent_of(value, longest), title))
        x += value
    return segments
