"""Timeline of a typical step of all ranks on one clock, with lanes for host, compute and communication."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Span
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import NEGLIGIBLE, Tick, nice_ticks, percent_of
from ddpdoctor.report.charts.series import notable_ranks

LANES = ("host", "compute", "communication")
RANKS = 12
"""Maximum number of ranks."""
SPANS = 3000
"""Maximum number of bars."""
MAX_OTHER_LANES = 9
"""Maximum number of lanes per rank in addition to ``LANES``."""
LANE_HEIGHT, LANE_GAP, RANK_GAP = 13, 2, 9
MIN_GAP_SHARE = 0.0008
"""Bars of a kind are joined if the gap between them is below this share of the step."""


class Bar(msgspec.Struct, frozen=True):
    """A span: x and width in per cent, y in pixels from the top."""

    kind: str
    x: float
    width: float
    y: int
    title: str


class TimelineRank(msgspec.Struct, frozen=True):
    """A rank: label, and position in pixels."""

    label: str
    y: int
    lanes: list[Tick]
    """Lanes with the vertical position of their middle, in pixels."""


class StepData(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of one step, for SVG and plotly."""

    step: int
    ranks: list[int]
    spans: list[Span]
    """Spans of ``ranks``, with times relative to the start of the first span."""
    length_ms: float
    notes: list[str]

    @property
    def description(self) -> str:
        return (
            f"Activity of {words.count(len(self.ranks), 'rank')} in step {self.step}, which took "
            f"{words.milliseconds(self.length_ms)}, on one clock."
        )


def step_data(diagnosis: Diagnosis) -> StepData | None:
    """The step's spans; None without spans. If there are many ranks, the notable ones and the first others are kept."""
    source = diagnosis.timeline
    if source is None:
        return None
    spans = [span for span in source.spans if span.duration_ms >= 0 and span.start_ms == span.start_ms]
    lanes = {*LANES, *sorted({span.lane for span in spans} - set(LANES))[:MAX_OTHER_LANES]}
    spans = [span for span in spans if span.lane in lanes]
    if not spans:
        return None
    chosen = _chosen_ranks(diagnosis, spans)
    kept = [span for span in spans if span.rank in chosen]
    start = min(span.start_ms for span in kept)
    length = max(span.start_ms + span.duration_ms for span in kept) - start
    if length < NEGLIGIBLE:
        return None
    present = len({span.rank for span in spans})
    notes = [source.note] if source.note else []
    if len(chosen) < present:
        # Replaces the diagnosis's own note, which describes an earlier selection of ranks.
        rank_count = max(len(diagnosis.ranks), present)
        notes = [f"{len(chosen)} of {rank_count} ranks are drawn, first those named by findings."]
    return StepData(
        step=source.step,
        ranks=chosen,
        spans=[msgspec.structs.replace(span, start_ms=span.start_ms - start) for span in kept],
        length_ms=length,
        notes=notes,
    )


def timeline(data: StepData | None) -> SimpleNamespace | None:
    """The bars of ``data``; None for None."""
    if data is None:
        return None
    length = data.length_ms
    merged = merge(data.spans, length)
    ranks, places, height = _rows(data.ranks, merged)
    bars = [
        Bar(
            span.kind,
            percent_of(span.start_ms, length),
            max(percent_of(span.duration_ms, length), 0.05),
            places[span.rank, span.lane],
            f"rank {span.rank}, {span.lane}: {span_words(span)} {words.milliseconds(span.duration_ms)} "
            f"from {words.milliseconds(span.start_ms)}",
        )
        for span in merged
    ]
    return SimpleNamespace(
        step=data.step,
        ranks=ranks,
        bars=bars,
        kinds=kinds(merged),
        height=height,
        lane_height=LANE_HEIGHT,
        x_ticks=[
            Tick(percent_of(value, length), words.strip_zeros(words.milliseconds(value)))
            for value in nice_ticks(length, 5)
        ],
        description=data.description,
        notes=data.notes,
    )


def _chosen_ranks(diagnosis: Diagnosis, spans: Sequence[Span]) -> list[int]:
    present = sorted({span.rank for span in spans})
    if len(present) <= RANKS:
        return present
    notable = [rank for rank in notable_ranks(diagnosis) if rank in set(present)][: RANKS * 2 // 3]
    others = [rank for rank in present if rank not in notable]
    return sorted(notable + others[: RANKS - len(notable)])


def merge(
    spans: Sequence[Span], length: float, min_gap_share: float = MIN_GAP_SHARE, max_spans: int = SPANS
) -> list[Span]:
    """Join spans of a kind that are too close to distinguish. The distance is doubled until at most ``max_spans`` spans are left."""
    ordered = sorted(spans, key=_sort_key)
    distance = min_gap_share * length
    merged = _merge_once(ordered, distance)
    while len(merged) > max_spans and distance < length:
        distance *= 2
        merged = _merge_once(merged, distance)
    # If spans of different kinds prevent joining, keep the longest.
    longest = sorted(merged, key=lambda span: -span.duration_ms)[:max_spans]
    return merged if len(merged) <= max_spans else sorted(longest, key=_sort_key)


def _sort_key(span: Span) -> tuple[int, str, float]:
    return span.rank, span.lane, span.start_ms


def _merge_once(spans: Sequence[Span], distance: float) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        before = merged[-1] if merged else None
        if (
            before is not None
            and (before.rank, before.lane, before.kind) == (span.rank, span.lane, span.kind)
            and span.start_ms - (before.start_ms + before.duration_ms) < distance
            and min(before.duration_ms, span.duration_ms) < 4 * distance
        ):
            end = max(before.start_ms + before.duration_ms, span.start_ms + span.duration_ms)
            name = before.name if before.name == span.name else ""
            duration = end - before.start_ms
            merged[-1] = Span(before.rank, before.lane, before.kind, name, before.start_ms, duration)
        else:
            merged.append(span)
    return merged


def lanes_of(ranks: Sequence[int], spans: Sequence[Span]) -> list[tuple[int, list[str]]]:
    """Each rank with its lanes, from top to bottom."""
    used = {(span.rank, span.lane) for span in spans}
    extra = sorted({lane for _, lane in used} - set(LANES))
    return [(rank, [name for name in (*LANES, *extra) if (rank, name) in used]) for rank in ranks]


def _rows(
    ranks: Sequence[int], spans: Sequence[Span]
) -> tuple[list[TimelineRank], dict[tuple[int, str], int], int]:
    rows, places, y = [], {}, 0
    for rank, used in lanes_of(ranks, spans):
        top, lanes = y, []
        for lane in used:
            places[rank, lane] = y
            lanes.append(Tick(y + LANE_HEIGHT / 2, lane))
            y += LANE_HEIGHT + LANE_GAP
        rows.append(TimelineRank(f"rank {rank}", top, lanes))
        y += RANK_GAP
    return rows, places, y - RANK_GAP


def span_words(span: Span) -> str:
    """The name and kind of a span as text."""
    kind = words.part(span.kind)
    return f"{span.name} ({kind})" if span.name and span.name != span.kind else kind


def kinds(spans: Sequence[Span]) -> list[str]:
    """The kinds of ``spans``, in the order of the legend."""
    present = {span.kind for span in spans}
    known = [kind for kind in words.PART_LABELS if kind in present]
    return known + sorted(present - set(known))
