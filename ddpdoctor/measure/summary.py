"""What reports draw: summaries per rank, series over time, one step's timeline, bandwidth by size."""

from __future__ import annotations

import msgspec


class Speaker(msgspec.Struct, frozen=True):
    """The recording whose times are taken for the job's."""

    recording: str
    """"host-log" (the step logs), "device-log" (the step logs in the devices' own time) or "window" (the profiled steps)."""
    why: str
    """A sentence."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over the measured steps."""

    rank: int
    host: str | None = None
    device: str | None = None
    step_ms: float | None = None
    """Mean step time."""
    breakdown_ms: dict[str, float] = {}
    """Mean milliseconds per step and part; adds up to ``step_ms``."""
    late_ms: float | None = None
    """Mean lateness at synchronisation points per step against the median rank."""
    caused_wait_ms: float | None = None
    """By how much it was the last to arrive, ahead of the second last, summed over a step's synchronisations; mean per step."""


class WindowCost(msgspec.Struct, frozen=True, kw_only=True):
    """What our own profiler window cost the job, once. Step times leave it out where there are enough other steps."""

    first: int
    """The first and the last step inside."""
    last: int
    step_ms: float
    """Median of those steps, without the one that opened the window."""
    extra_ms: float
    """What they, and the steps in which the window was opened, closed and saved, took more than as many usual ones."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Step times over time, thinned to at most a few hundred points."""

    steps: list[int] = []
    """Step number of each point (first of the group where several steps are one point)."""
    ranks: list[int] = []
    step_ms: list[list[float | None]] = []
    """One list per rank in ``ranks``."""
    late_ms: list[list[float | None]] = []
    """Lateness of each rank against the median rank, the same shape."""


class Span(msgspec.Struct, frozen=True):
    """A bar in the timeline of one step."""

    rank: int
    lane: str
    """"host", "compute", "communication"."""
    kind: str
    """A part of the breakdown, or "forward", "backward", "optimizer"."""
    name: str
    start_ms: float
    duration_ms: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One typical step over all (or a choice of) ranks, on the common clock."""

    step: int
    spans: list[Span] = []
    note: str = ""


class BandwidthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one operation and size class."""

    operation: str
    bytes: float
    count: int
    transfer_ms: float
    """Median transfer."""
    bus_gb_per_s: float


class TelemetrySeries(msgspec.Struct, frozen=True, kw_only=True):
    """One measured quantity over time, thinned."""

    source: str
    """Host or "host GPU 0"."""
    field: str
    unit: str
    t_s: list[float] = []
    """Seconds since the run's start."""
    values: list[float | None] = []
