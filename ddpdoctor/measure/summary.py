"""Data for charts and tables of reports: summaries per rank, series over time, one step's timeline, bandwidth by size."""

from __future__ import annotations

import msgspec

from .places import CodeLine


class Speaker(msgspec.Struct, frozen=True):
    """The primary recording, from which causes are measured."""

    recording: str
    """"host-log" (the step logs), "device-log" (the step logs in device time) or "window" (the profiled steps)."""
    why: str
    """The reason, as a sentence."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of one rank while it was recorded; null if unknown."""

    process_bytes: float | None = None
    """Memory of its own process, without file pages."""
    workers_bytes: float | None = None
    """Memory of its child processes together. Memory shared by forked processes counts for each."""
    grows_bytes_per_hour: float | None = None
    """Growth of its process throughout the run; null if it does not grow, or was observed for too short a time."""
    allocated_peak_bytes: float | None = None
    """Tensors on its device."""
    reserved_peak_bytes: float | None = None
    """Memory that PyTorch's allocator reserved on its device."""
    device_total_bytes: float | None = None
    phase_peak_bytes: dict[str, float] = {}
    """Peak memory of tensors on the device by phase of a step, from samples at random times."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over the measured steps."""

    rank: int
    host: str | None = None
    device: str | None = None
    step_ms: float | None = None
    """Mean step time."""
    breakdown_ms: dict[str, float] = {}
    """Mean milliseconds per step, by part; adds up to ``step_ms``."""
    late_ms: float | None = None
    """Lateness relative to the median rank (with two ranks: the other one), summed over a step's synchronisations; mean per step."""
    caused_wait_ms: float | None = None
    """Time from the second-last arrival to its own, if it arrives last, summed over a step's synchronisations; mean per step."""
    memory: RankMemory | None = None


class WindowCost(msgspec.Struct, frozen=True, kw_only=True):
    """The one-time cost of ddpdoctor's profiler window. Step times exclude these steps if there are enough others."""

    first: int
    """First step in the window."""
    last: int
    """Last step in the window."""
    step_ms: float
    """Median of these steps, without the one that opened the window."""
    extra_ms: float
    """Extra time of these steps and of those that opened, closed and saved the window, relative to the usual step time."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Step times over time, thinned to at most a few hundred points."""

    steps: list[int] = []
    """Step number of each point (the first one, if several steps are one point)."""
    ranks: list[int] = []
    step_ms: list[list[float | None]] = []
    """One list per rank in ``ranks``."""
    late_ms: list[list[float | None]] = []
    """Lateness of each rank relative to the median rank; same shape."""


class Span(msgspec.Struct, frozen=True):
    """A bar in the timeline of one step."""

    rank: int
    lane: str
    """"host", "compute" or "communication"."""
    kind: str
    """A part of the breakdown, or "forward", "backward", "optimizer"."""
    name: str
    start_ms: float
    duration_ms: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One typical step of all (or some) ranks, on the common clock."""

    step: int
    spans: list[Span] = []
    note: str = ""


class FlameFrame(msgspec.Struct, frozen=True):
    """A frame of a flame graph: a line of code below its callers."""

    place: int
    """Index in the graph's ``places``."""
    depth: int
    """Number of its callers."""
    start_ms: float
    """Horizontal position of its left edge; not a point in time."""
    ms: float
    """Time per step in it and in its callees."""
    beyond_ms: float | None = None
    """Difference to the same frame of the graph it is compared with; null in that graph."""


class Flame(msgspec.Struct, frozen=True, kw_only=True):
    """The widest frames of the stack samples of some steps of one rank."""

    rank: int
    which: str
    """"late steps", "other steps" or "all steps"."""
    steps: int
    samples: int
    mean_ms: float
    """Mean length of those steps: the full width of the graph."""
    against: str | None = None
    """The graph that it is compared with: rank and steps."""
    places: list[CodeLine] = []
    frames: list[FlameFrame] = []


class BandwidthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one operation and size class, in process groups with the same number of ranks and of hosts."""

    operation: str
    bytes: float
    count: int
    transfer_ms: float
    """Median transfer."""
    bus_gb_per_s: float
    ranks: int = 0
    """Ranks in the process group; 0 if unknown."""
    hosts: int = 0
    """Hosts of these ranks; 0 if unknown."""


class TelemetrySeries(msgspec.Struct, frozen=True, kw_only=True):
    """One measured quantity over time, thinned."""

    source: str
    """The host name; for a GPU or a rank such as "host GPU 0" or "host rank 3"."""
    field: str
    unit: str
    t_s: list[float] = []
    """Seconds since the run's start."""
    values: list[float | None] = []


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """All data that reports draw. The field names are those in a diagnosis."""

    speaker: Speaker | None = None
    window: WindowCost | None = None
    ranks: list[RankSummary] = []
    series: Series = Series()
    timeline: Timeline | None = None
    flames: list[Flame] = []
    bandwidth: list[BandwidthPoint] = []
    telemetry: list[TelemetrySeries] = []
