"""What reports draw: summaries per rank, series over time, one step's timeline, bandwidth by size."""

from __future__ import annotations

import msgspec

from .places import CodeLine


class Speaker(msgspec.Struct, frozen=True):
    """The primary recording: the one that causes are measured by."""

    recording: str
    """"host-log" (the step logs), "device-log" (the step logs in the devices' own time) or "window" (the profiled steps)."""
    why: str
    """A sentence."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of one rank while it was recorded; null where that is unknown."""

    process_bytes: float | None = None
    """Of its own process, without pages of files."""
    workers_bytes: float | None = None
    """Of its child processes together; what forked ones share counts for each."""
    grows_bytes_per_hour: float | None = None
    """Growth of its process throughout the run; null where it does not grow, or was watched for too short a time."""
    allocated_peak_bytes: float | None = None
    """Tensors on its device."""
    reserved_peak_bytes: float | None = None
    """What PyTorch's allocator reserved on its device."""
    device_total_bytes: float | None = None
    phase_peak_bytes: dict[str, float] = {}
    """Peak memory of tensors on the device by phase of a step, from samples at random moments."""


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
    """Mean lateness at synchronisation points per step, relative to the median rank (of two ranks: to the other one)."""
    caused_wait_ms: float | None = None
    """By how much it was the last to arrive, ahead of the second last, summed over a step's synchronisations; mean per step."""
    memory: RankMemory | None = None


class WindowCost(msgspec.Struct, frozen=True, kw_only=True):
    """What ddpdoctor's profiler window cost the job, once. Step times exclude it where there are enough other steps."""

    first: int
    """The first and the last step inside."""
    last: int
    step_ms: float
    """Median of those steps, without the one that opened the window."""
    extra_ms: float
    """Extra time of these steps and of those in which the window was opened, closed and saved, compared with as many usual ones."""


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


class FlameFrame(msgspec.Struct, frozen=True):
    """A frame of a flame graph: a line of code below its callers."""

    place: int
    """In the graph's ``places``."""
    depth: int
    """Frames above it."""
    start_ms: float
    """Where it begins along the width: not when."""
    ms: float
    """Time per step in it and in what it calls."""
    beyond_ms: float | None = None
    """Difference to the same frame of the graph it is compared with; null in that graph."""


class Flame(msgspec.Struct, frozen=True, kw_only=True):
    """The stack samples of some steps of one rank, the widest frames of them."""

    rank: int
    which: str
    """"late steps", "other steps" or "all steps"."""
    steps: int
    samples: int
    mean_ms: float
    """Mean length of those steps, which is the whole width."""
    against: str | None = None
    """The graph its frames are compared with: rank and steps."""
    places: list[CodeLine] = []
    frames: list[FlameFrame] = []


class BandwidthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one operation and size class, in process groups with the same numbers of ranks and hosts."""

    operation: str
    bytes: float
    count: int
    transfer_ms: float
    """Median transfer."""
    bus_gb_per_s: float
    ranks: int = 0
    """In the process group; 0 in diagnoses of older versions."""
    hosts: int = 0
    """On which its ranks are; likewise."""


class TelemetrySeries(msgspec.Struct, frozen=True, kw_only=True):
    """One measured quantity over time, thinned."""

    source: str
    """Host or "host GPU 0"."""
    field: str
    unit: str
    t_s: list[float] = []
    """Seconds since the run's start."""
    values: list[float | None] = []


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that reports draw, by its names in a diagnosis."""

    speaker: Speaker | None = None
    window: WindowCost | None = None
    ranks: list[RankSummary] = []
    series: Series = Series()
    timeline: Timeline | None = None
    flames: list[Flame] = []
    bandwidth: list[BandwidthPoint] = []
    telemetry: list[TelemetrySeries] = []
