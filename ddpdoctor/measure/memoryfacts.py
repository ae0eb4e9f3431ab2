"""Facts of memory: the family ``memory`` (see :mod:`.facts`). ``measure/memory/`` finds them."""

from __future__ import annotations

import msgspec


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that grows throughout the run, after the warm-up and through every evaluation and pass over the data: no plateau, and
    nothing released. The numbers are those of the rank that grows fastest."""

    ranks: list[int] = []
    """Ranks that grow."""
    fastest_rank: int | None = None
    bytes_per_step: float
    bytes_per_hour: float
    """The same per hour, at the rank's step time while it was watched."""
    low_bytes_per_hour: float
    """Lower end of the 90 % interval of the slope."""
    high_bytes_per_hour: float
    grown_bytes: float
    """Growth while it was watched."""
    held_bytes: float
    """Memory in use at the end."""
    free_bytes: float | None = None
    """Free memory then, of the host or its control group's limit, or of the device."""
    full_in_hours: float | None = None
    """Hours until that is used up if all ranks of the host, or the device, continue to grow like this."""
    may_be_cache: bool = False
    """Whether a dataset that caches what it has read would look the same so far: it is in the process that grows, and the passes over
    the data were too few to decide."""
    ends_with_pass: bool = False
    """Whether it is in workers that end with the pass over the data, as a DataLoader's do without persistent_workers, and then release
    it."""
    bounded_bytes: float | None = None
    """Largest further growth on the host that is full first, if it is such a cache (bounded by the dataset) or ends with the pass; null
    if the length of a pass is unknown, or neither bounds it."""
    bound_fits: bool | None = None
    """Whether that much is free there; null where either is unknown."""


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the ranks' processes, their loaders' workers and their devices. Pages of files do not count: the kernel reclaims them."""

    watched_hours: float | None = None
    """For how long the processes' memory was watched after the warm-up; null where that was too short to detect growth."""
    process: Growth | None = None
    """Ranks' own processes that grow; null where none does."""
    workers: Growth | None = None
    """Ranks whose child processes grow, all together: the loader's workers, where it has some."""
    device_watched_hours: float | None = None
    """For how long the devices' memory was watched."""
    device: Growth | None = None
    """Ranks whose tensors on the device grow."""
    on_device: bool | None = None
    """Whether the following amounts are of the ranks' devices, by torch's counters; else of the ranks' processes with their workers."""
    most_bytes: float | None = None
    """Peak memory of any rank."""
    typical_bytes: float | None = None
    """Median of the other ranks' peaks; null for a single rank."""
    heaviest_rank: int | None = None
    heavy_ranks: list[int] | None = None
    """The rank with the highest peak, and those with at least half of its excess over the others; empty where none has any."""
    limit_bytes: float | None = None
    """Memory of the smallest device, or of the tightest host or its control group."""
    headroom_bytes: float | None = None
    """Memory that was never used, per rank: on the fullest device, by torch's peak of reserved memory and NVML's; for a job on CPUs the
    rank's part of what its host never used."""
    headroom_share: float | None = None
    """Share that was never used of the fullest device's, or the tightest host's, memory."""
    batch_times: float | None = None
    """Upper bound of the factor by which the batch can grow in the devices' memory, if all memory allocated and freed within a step
    grows with it. Null on CPUs."""
    allocated_peak_bytes: float | None = None
    """Peak memory of tensors on the device, on the rank with the most."""
    reserved_peak_bytes: float | None = None
    """Peak memory reserved by PyTorch's caching allocator on the device, on the rank with the most."""
    allocation_retries: float | None = None
    """How often the allocator found no memory, freed its cache and waited for the device, on the rank with the most."""
    lasting_retries: float | None = None
    """How often in the second half of the readings, on the rank with the most then."""
    steps_per_retry: float | None = None
    """Steps between them, on average; null without any, or where the steps are unknown."""
