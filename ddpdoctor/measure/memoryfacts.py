"""Facts of memory: the family ``memory`` (see :mod:`.facts`). ``measure/memory/`` finds them."""

from __future__ import annotations

import msgspec


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that grows from step to step all along, after the warm-up and through every evaluation and pass over the data: no plateau,
    and nothing given back. The numbers are those of the rank that grows fastest."""

    ranks: list[int] = []
    """Those that grow."""
    fastest_rank: int | None = None
    bytes_per_step: float
    bytes_per_hour: float
    """The same at the pace at which the rank trained while it was watched."""
    low_bytes_per_hour: float
    """Lower end of the range in which, nine times in ten, the slope lies."""
    high_bytes_per_hour: float
    grown_bytes: float
    """What it grew by while it was watched."""
    held_bytes: float
    """What it held at the end."""
    free_bytes: float | None = None
    """What was left then, of the host's memory or its control group's limit, or of the device's."""
    full_in_hours: float | None = None
    """When that is used up if all ranks of the host, or the device, go on growing like this."""
    may_be_cache: bool = False
    """Whether a data set that keeps what it has read would look the same so far: it lies in what grows, and the passes over the
    data were too few to tell."""
    ends_with_pass: bool = False
    """Whether workers hold it that end with the pass over the data, as a DataLoader's do without persistent_workers, and then give it
    back."""
    bounded_bytes: float | None = None
    """What can still be added on the host that is full first, if it is such a cache, which ends with the data set, or ends with the
    pass; null if the length of a pass is unknown, or neither bounds it."""
    bound_fits: bool | None = None
    """Whether so much is left there; null where either is unknown."""


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the ranks' processes, their loaders' workers and their devices. Pages of files do not count: the kernel takes them
    back."""

    watched_hours: float | None = None
    """For how long the processes' memory was watched, once the job had settled; null where that was too short to tell of growth."""
    process: Growth | None = None
    """Ranks' own processes that grow; null where none does."""
    workers: Growth | None = None
    """Ranks whose child processes grow, all together: the loader's workers, where it has some."""
    device_watched_hours: float | None = None
    """For how long the devices' memory was watched."""
    device: Growth | None = None
    """Ranks whose tensors on the device grow."""
    on_device: bool | None = None
    """Whether the amounts below are of the ranks' devices, by torch's counters; else of the ranks' processes with their workers."""
    most_bytes: float | None = None
    """Most that any rank held."""
    typical_bytes: float | None = None
    """The same of the median of the other ranks; null for a single one."""
    heaviest_rank: int | None = None
    heavy_ranks: list[int] | None = None
    """The rank that held most, and those with at least half of its excess over the others; empty where none has any."""
    limit_bytes: float | None = None
    """Memory of the smallest device, or of the tightest host or its control group."""
    headroom_bytes: float | None = None
    """What each rank never used: of its device, the fullest counts, by torch's peak of reserved memory and NVML's; for a job on CPUs
    its part of what its host never used."""
    headroom_share: float | None = None
    """What was never used of the fullest device's, or the tightest host's, memory."""
    batch_times: float | None = None
    """At most so many times the batch fits into the headroom of the devices, if what grows with it is all that comes and goes within
    a step. Null on CPUs."""
    allocated_peak_bytes: float | None = None
    """Most that tensors took on the device, on the rank with most."""
    reserved_peak_bytes: float | None = None
    """Most that PyTorch's caching allocator reserved on the device, on the rank with most."""
    allocation_retries: float | None = None
    """How often the allocator found no memory, freed its cache and waited for the device, on the rank with most."""
