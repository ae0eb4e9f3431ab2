"""Step times per rank over the run."""

from __future__ import annotations

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report import words
from ddpdoctor.report.charts.lines import ChartAxes, LineData, Mark, line_data
from ddpdoctor.report.charts.scale import finite_values
from ddpdoctor.report.charts.whole_run import event_words, run_event

_MOST_MARKED = 100
"""Most periodic steps that are marked one by one; of more, a line marks the first to the last one."""


def step_time_data(diagnosis: Diagnosis) -> LineData | None:
    """One line per rank, or for many ranks the median, a band and the notable ranks; None with fewer than two points."""
    series = diagnosis.series
    length = min(len(series.steps), max((len(row) for row in series.step_ms), default=0))
    if length < 2:
        return None
    outliers = [rank_line(rank) for rank in notable_ranks(diagnosis)]
    frame = ChartAxes(
        title="Step times",
        description=f"Step time over {words.count(length, 'point')}, per rank.",
        x=series.steps[:length],
        x_label="step",
        height=180,
        show=words.milliseconds,
        unit="ms",
        group="ranks",
        are_means=True,
    )
    lines = [(rank_line(rank), row) for rank, row in zip(series.ranks, series.step_ms, strict=False)]
    return line_data(frame, lines, outliers, _marks(diagnosis))


def _marks(diagnosis: Diagnosis) -> list[Mark]:
    """Single pauses, a period, a change or growth of the step time, as far as the facts ``run`` have them."""
    marks = []
    for kind in ("pause", "periodic", "change", "growth"):
        event = run_event(diagnosis, kind)
        if event is None:
            continue
        at: list[float] = sorted(event.steps)
        levels = None
        if kind == "growth":
            levels = event.before_ms or 0.0, event.after_ms or 0.0
        elif kind == "change":
            at = at[:1]
        elif len(at) > _MOST_MARKED:
            at, levels = [at[0], at[-1]], (0.0, 0.0)
        marks.append(Mark(kind=kind, label=event_words(event, kind), at=at, levels=levels))
    return marks


def rank_line(rank: int) -> str:
    """The name of a rank's line."""
    return f"rank {rank}"


NOTABLE_SHARE = 0.1
"""A rank is notable if it delays others by at least this share of what the worst rank does."""


def notable_ranks(diagnosis: Diagnosis) -> list[int]:
    """Ranks to show separately: first those named by the findings, by cost, then those that delay others most."""
    order: dict[int, None] = {}
    for finding in diagnosis.findings:
        order |= dict.fromkeys((finding.ranks or [])[:8])
    waits = {rank.rank: rank.caused_wait_ms or rank.late_ms or 0.0 for rank in diagnosis.ranks}
    least = NOTABLE_SHARE * max(waits.values(), default=0.0)
    by_wait = sorted(waits, key=lambda rank: -waits[rank])
    order |= dict.fromkeys(rank for rank in by_wait if waits[rank] > 0 and waits[rank] >= least)
    if not diagnosis.ranks:
        latest = sorted(
            zip(diagnosis.series.ranks, diagnosis.series.late_ms, strict=False),
            key=lambda pair: -sum(finite_values(pair[1])),
        )
        order |= dict.fromkeys(rank for rank, row in latest if sum(finite_values(row)) > 0)
    return list(order)
