"""Facts: every number a rule may read, typed, with its unit in its name. ``None`` means "not measured", never
zero.

``docs/facts.md`` is generated from this file. Times are milliseconds per optimizer step, averaged over the
measured steps, unless a name says otherwise. Shares are fractions of the step time on the critical path (0 to
1).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from .hangfacts import HangFacts
from .places import Where
from .taxonomy import LateCause, SharedCause

RANGE_LEVEL = 0.9
"""How often the saving of a mended cause lies in the range of its price."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One cause and its price: what a replay of the measured steps saves when the cause is taken out."""

    ms_per_step: float
    """Measured step time minus replayed step time without the cause, mean over the measured steps. Where ranks are
    late for different causes, which hide behind each other: this cause's part of what all of them cost (their
    Shapley values), so that parts add up."""
    low_ms_per_step: float | None = None
    """Lower end of the range in which, nine times in ten, the saving lies once the cause is mended: from the cycles' own
    scatter, and from how well the replay explains them. Never below 0; null where too few cycles tell."""
    high_ms_per_step: float | None = None
    """Upper end of that range, never above the mean step."""
    beside_ms_per_step: float | None = None
    """What of it is saved where the same work is done beside the step and not less of it, as by a loader's workers, with the
    cores that stood idle; time in which nothing computed needs none. Null where that is unknown, and where nothing is moved."""
    share: float
    """``ms_per_step`` / mean step time."""
    speedup: float
    """Mean step time / replayed step time without this cause alone; 1.0 is no gain."""
    alone_ms_per_step: float | None = None
    """Step time saved without this cause while the other late causes stay; null but under ``late``."""
    remaining_ms_per_step: float | None = None
    """Step time that this cause still costs once the other late causes are gone; null but under ``late``."""
    waiting_ms_per_step: float | None = None
    """``ms_per_step`` if computation waits for those collectives of which the recording does not tell it surely; null where
    that makes no difference of a fifth. The price itself weighs both by how likely they are."""
    going_on_ms_per_step: float | None = None
    """The same if computation goes on beside them."""
    ranks: list[int] | None = None
    """Culprit ranks, never the victims; None where all ranks are concerned."""
    own_ms: float | None = None
    """Time that the culprit ranks (or, where all are concerned, the median rank) spend on it per step."""
    typical_ms: float | None = None
    """Time that the median of the other ranks spends on the same, per step."""
    occurrence_ms: float | None = None
    """Median lateness, or duration, in the steps in which it happens."""
    steps_hit: int = 0
    """Steps in which it happens."""
    steps_seen: int = 0
    """Steps looked at."""
    first_step: int | None = None
    last_step: int | None = None
    persistence: str = "always"
    """"always" (over 80 % of steps), "range" (a run of neighbouring steps), "periodic" or "random"."""
    period_steps: int | None = None
    """Distance between occurrences, where periodic."""
    stands_out_in: list[int] = []
    """Steps far out of all others in a short window, which cannot tell how often they come; empty where more speaks for the cause."""
    kinds: list[str] = []
    """Kinds of work that make ranks late in turn (``turns`` only): those under ``late``."""
    where: list[Where] = []
    gap: str | None = None
    """Where in a training step it happens, of work that lies outside the phases: ``between optimizer.step() and the next
    batch``. Null where the phases were not marked, or most of it lies in none or in several gaps."""
    phase: str | None = None
    """``the forward pass``, ``backward()`` or ``optimizer.step()``: the one phase in which its ranks compute longer, where ranks that
    are slower altogether would be longer in the others, too. Null where they are, where that cannot be told, and of other work."""
    operation: str | None = None
    """What is executed there, where it has a name: a collective's name, a kernel, an operator."""


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Who ran."""

    world_size: int | None = None
    ranks_seen: int = 0
    hosts: int | None = None
    backend: str | None = None
    device: str | None = None
    """"cpu", "cuda", "rocm", "xpu", ..."""
    device_name: str | None = None
    torch: str | None = None
    nccl: str | None = None
    is_ddp: bool | None = None
    data_parallel: bool | None = None
    """torch.nn.DataParallel is used."""
    compiled: bool | None = None
    autocast: bool | None = None
    matmul_precision: str | None = None


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Step times on the critical path: from the earliest start to the latest end over the ranks, divided over steps."""

    source: str = "step-log"
    """"step-log" (the whole run) or "trace" (the profiled window only)."""
    seen: int = 0
    measured: int = 0
    """Steps left after warm-up, profiler-disturbed, evaluation and incomplete steps are set aside."""
    mean_ms: float | None = None
    median_ms: float | None = None
    p95_ms: float | None = None
    samples_per_s: float | None = None
    """All ranks together."""
    batch_size: float | None = None
    """Median samples per rank and micro-batch."""
    batch_size_most: float | None = None
    """Mean batch size of the rank that gets most samples per step, relative to the median rank (1.0: even)."""
    input_most: float | None = None
    """How much the rank with most of it has to compute, relative to the median rank (1.0: even): elements of the forward's
    inputs, or in traces with shapes multiplications of matrices. Samples of different length or size."""
    micro_batches: float | None = None
    """Backward passes per optimizer step."""
    input_explains: float | None = None
    """Part (0 to 1) of how the ranks' computation differs from step to step that their inputs' sizes explain."""
    slow_steps_share: float | None = None
    """Share of measured steps slower than 1.5 x the median."""
    operators_seen: bool | None = None
    """Whether the operators outside forward, backward and optimizer were seen, in a profiled window: host
    time is then Python work, and no computation."""


if TYPE_CHECKING:

    class LateFacts(msgspec.Struct, frozen=True, kw_only=True):
        def __init__(self, **costs: Cost | None) -> None: ...
        def __getattr__(self, cause: str) -> Cost | None: ...

    class SharedFacts(msgspec.Struct, frozen=True, kw_only=True):
        def __init__(self, **costs: Cost | None) -> None: ...
        def __getattr__(self, cause: str) -> Cost | None: ...

else:

    def _by_cause(name: str, causes: type[StrEnum], doc: str) -> type[msgspec.Struct]:
        """A struct with one cost for each cause of the taxonomy, which says what it is."""
        fields = [(cause.value, Cost | None, None) for cause in causes]
        return msgspec.defstruct(
            name, fields, frozen=True, kw_only=True, module=__name__, namespace={"__doc__": doc}
        )

    LateFacts = _by_cause(
        "LateFacts",
        LateCause,
        """What some ranks do longer than the median rank, so that all others wait: each a :class:`Cost` of the
    excess alone.""",
    )
    SharedFacts = _by_cause(
        "SharedFacts",
        SharedCause,
        """What all ranks alike spend: each a :class:`Cost` of the part common to the ranks (its excess on one
    rank is in ``late``).""",
    )


class ArrivalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Who arrives late at synchronisations on average, whatever of it costs time."""

    late_ranks: list[int] | None = None
    """Ranks that are late by a tenth of the step or more, and by twice as much as the median of the others; the latest first."""
    late_ms: dict[str, float] | None = None
    """Mean lateness per step of each of them, against the median rank."""
    late_steps: dict[str, int] | None = None
    """In how many steps each of them is late."""
    on_time_saves_ms: float | None = None
    """Step time that a replay saves in which those of them arrive with the median rank whose lateness has no price under
    ``late``; null where that of all has."""


class CommunicationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives: waiting apart from transfer."""

    wait_ms: float | None = None
    """Mean over ranks of waiting for the last rank, exposed."""
    transfer_ms: float | None = None
    """Exposed transfer, mean over ranks."""
    total_transfer_ms: float | None = None
    """All transfer, hidden or not."""
    exposed_ms: float | None = None
    """Time in collectives beside which no computation runs, waiting included, median rank: known also where
    ranks could not be matched."""
    hidden_share: float | None = None
    """Share of the time in collectives that ran beside computation."""
    bytes_per_step: float | None = None
    """Bytes that a rank contributes per step."""
    sharded_share: float | None = None
    """Share of the time in collectives that gather and scatter sharded parameters and gradients (FSDP, ZeRO) instead of
    reducing whole ones, 0 to 1."""
    collectives_per_step: float | None = None
    bus_gb_per_s: float | None = None
    """Median bus bandwidth (10^9 bytes/s, nccl-tests' definition) of messages of 1 MiB and more."""
    best_bus_gb_per_s: float | None = None
    """Best bus bandwidth of any message size class in the run."""
    latency_us: float | None = None
    """Fixed cost of one message: intercept of transfer time over bytes."""
    matched: int | None = None
    unmatched: int | None = None
    refused: str | None = None
    """Why the matching was not credible and was refused."""
    whole: int | None = None
    """Collectives of the window that were found on all ranks of their group that are here."""
    lacking_left: int | None = None
    """Collectives that a rank lacks which has no more of its group, though its window goes on."""
    lacking_lost: int | None = None
    """Collectives that a rank lacks which has those before and behind them: their events were not recorded."""
    lacking_cut: int | None = None
    """Collectives that a rank lacks because its window does not reach them."""
    clock_error_us: float | None = None
    """Error bound of the common clock."""
    slow_link_ranks: list[int] | None = None
    """Ranks of process groups whose transfers are persistently slower than those of like groups; null where there
    are no like groups to compare."""


class BucketFacts(msgspec.Struct, frozen=True, kw_only=True):
    """DDP's gradient buckets."""

    per_sync: float | None = None
    """Buckets per reduction of the gradients."""
    median_bytes: float | None = None
    total_bytes: float | None = None
    cap_bytes: float | None = None
    largest_parameter_bytes: float | None = None
    """Of the largest DDP module: a bucket holds whole parameters, so none can be smaller than this and hold it."""
    favoured_cap_bytes: float | None = None
    """The bucket size that the measured latency and bandwidth favour."""
    backward_ms: float | None = None
    first_ready_share: float | None = None
    """When the first bucket is ready, as a share of the backward pass."""
    tail_ms: float | None = None
    """From the last rank's last gradient to the end of the last reduction."""
    syncs_per_step: float | None = None
    """Backward passes per optimizer step in which gradients were reduced."""
    barriers_per_step: float | None = None
    collectives_per_step: float | None = None
    """Blocking collectives called from Python per step, barriers apart."""


class LoaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the loader that feeds the training loop."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    sampler: str | None = None
    dataset: str | None = None
    where: Where | None = None
    wait_ms: float | None = None
    """Median over ranks of the time in ``next`` per step."""
    longest_wait_ms: float | None = None
    """The same on the rank that waits longest."""
    ready_batches: float | None = None
    """Mean number of batches that stood ready in the queue, on the rank with the fewest."""
    computing_share: float | None = None
    """Part of ``next`` in which the longest waiting rank computed or wanted a core, and did not sleep; null with workers."""


class DdpFacts(msgspec.Struct, frozen=True, kw_only=True):
    """DDP's settings."""

    module: str | None = None
    parameters_bytes: float | None = None
    find_unused_parameters: bool | None = None
    unused_parameter_bytes: float | None = None
    search_ms: float | None = None
    """What looking for unused parameters costs a step: on a device what its work does not hide, else with the message about
    them."""
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    broadcast_buffers: bool | None = None
    buffer_bytes: float | None = None
    comm_hook: str | None = None
    where: Where | None = None


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, from kernels in the window and from NVML. All None on a CPU job."""

    busy_share: float | None = None
    """Share of the step in which a computation kernel runs, median rank."""
    idle_share: float | None = None
    kernels_per_step: float | None = None
    optimizer_kernels_share: float | None = None
    """Share of the kernels that are launched inside an optimizer's step."""
    median_kernel_us: float | None = None
    tensor_core_share: float | None = None
    """Share of matrix-multiplication kernel time that uses tensor cores."""
    matmul_share: float | None = None
    """Share of computation kernel time in matrix multiplications and convolutions."""
    pageable_copy_ms: float | None = None
    copy_bytes_per_step: float | None = None
    compute_capability: float | None = None
    utilization_percent: float | None = None
    """Mean of NVML's GPU utilisation over the ranks' GPUs."""
    memory_used_share: float | None = None
    """Largest share of device memory in use on any rank."""
    throttled_ranks: list[int] | None = None
    throttle_reasons: list[str] | None = None
    throttled_share: float | None = None
    """Share of samples with a slowdown reason, on the throttled ranks."""
    sm_clock_share: float | None = None
    """Median SM clock of the slowest rank relative to the median rank."""
    narrow_link_ranks: list[int] | None = None
    """Ranks whose PCIe link is narrower or older than it could be."""
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    error_ranks: list[int] | None = None
    """Ranks whose GPU counted uncorrectable ECC or Xid errors during the run."""
    errors: list[str] | None = None
    temperature_max_celsius: float | None = None


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machines."""

    cores: float | None = None
    ranks_per_host: float | None = None
    cpu_percent: float | None = None
    """Mean CPU utilisation of the busiest host."""
    idle_cores: float | None = None
    """Cores that stand idle on the busiest host."""
    job_cores: float | None = None
    """Cores that the job's ranks and their loaders' workers use while the steps run, on the host with the fewest to spare."""
    run_delay_share: float | None = None
    """Share of the step in which the training thread was ready but had no CPU, on the worst rank."""
    threads_per_rank: float | None = None
    memory_used_share: float | None = None
    swap_bytes_per_s: float | None = None
    io_wait_percent: float | None = None


class PipelineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Pipeline stages and replicas, from tables of operations."""

    stages: int | None = None
    replicas: int | None = None
    slowdown: float | None = None
    """Step time over the step time if every operation took its typical time; 1.0 where nothing straggles."""
    slow_stages: list[int] | None = None
    """Stages that are slow on every replica."""
    stage: Cost | None = None
    """Those stages' computations beyond the typical ones."""


class WhatIfFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Mean step time, by replay, of the same job with one thing changed. Null where that thing is not there to be
    changed, or the window did not show what it takes to know."""

    nobody_late_ms: float | None = None
    """The late ranks do no more than the others."""
    instant_data_ms: float | None = None
    """Each batch is there when it is asked for."""
    no_barriers_ms: float | None = None
    """Explicit barriers are gone."""
    no_sync_ms: float | None = None
    """Gradients are reduced in the last micro-batch of a step only (DDP's no_sync)."""
    perfect_overlap_ms: float | None = None
    """All transfer of gradients runs beside computation, as far as the link can carry it and the hosts' cores do both."""
    link_twice_as_fast_ms: float | None = None
    """All collectives move their bytes in half the time; latencies stay."""
    favoured_buckets_ms: float | None = None
    """Gradients are reduced in buckets of ``buckets.favoured_cap_bytes``."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of a run. Rules address them by path, such as ``late.data.share`` or
    ``loader.num_workers``."""

    job: JobFacts = JobFacts()
    steps: StepFacts = StepFacts()
    late: LateFacts = LateFacts()
    shared: SharedFacts = SharedFacts()
    arrivals: ArrivalFacts = ArrivalFacts()
    communication: CommunicationFacts = CommunicationFacts()
    buckets: BucketFacts = BucketFacts()
    loader: LoaderFacts = LoaderFacts()
    ddp: DdpFacts = DdpFacts()
    gpu: GpuFacts = GpuFacts()
    host: HostFacts = HostFacts()
    pipeline: PipelineFacts = PipelineFacts()
    what_if: WhatIfFacts = WhatIfFacts()
    hang: HangFacts = HangFacts()
    breakdown: dict[str, float] = {}
    """Share of the critical step time per part; sums to 1."""
