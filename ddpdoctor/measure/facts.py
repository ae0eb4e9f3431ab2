"""Facts: every number a rule may read, typed, with its unit in its name. ``None`` means "not measured", never zero.

``docs/facts.md`` is generated from this file. Times are milliseconds per optimizer step, averaged over the measured steps, unless a
name says otherwise. Shares are fractions of the step time on the critical path (0 to 1).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from .places import Where
from .runfacts import HangFacts, MemoryFacts, RunFacts
from .taxonomy import LateCause, SharedCause

RANGE_LEVEL = 0.9
"""Level of a price's interval: the probability that the saving lies in it, once the cause is fixed."""
_LEAST_STEP_MS = 1e-6
"""Lower bound of the step time that remains after a saving; avoids division by zero."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One cause and its price: what a replay of the measured steps saves when the cause is taken out."""

    ms_per_step: float
    """Measured step time minus replayed step time without the cause, mean over the measured steps. If ranks are late for several
    causes, which hide behind each other: this cause's part of what all of them cost (its Shapley value), so that parts add up."""
    low_ms_per_step: float | None = None
    """Lower end of the 90 % interval of the saving, once the cause is fixed; null if there are too few cycles."""
    high_ms_per_step: float | None = None
    """Upper end of that interval, at most the mean step."""
    beside_ms_per_step: float | None = None
    """Saving if the same work is done concurrently with the step, as by a loader's workers, on the cores that were idle; time in which
    nothing computed needs none. Null if that is unknown, or if no work would move."""
    share: float
    """``ms_per_step`` / mean step time."""
    speedup: float
    """Mean step time / replayed step time without this cause alone; 1.0 is no gain."""
    alone_ms_per_step: float | None = None
    """Step time saved without this cause while the other late causes stay; null except under ``late``."""
    remaining_ms_per_step: float | None = None
    """Step time that this cause still costs once the other late causes are gone; null except under ``late``."""
    waiting_ms_per_step: float | None = None
    """``ms_per_step`` if computation waits for the collectives for which that is unclear; null if the difference is below a fifth."""
    going_on_ms_per_step: float | None = None
    """``ms_per_step`` if computation continues during them."""
    ranks: list[int] | None = None
    """Culprit ranks, never the victims; null if all ranks are concerned."""
    own_ms: float | None = None
    """Time per step that the culprit ranks spend on it (the median rank, if all are concerned)."""
    typical_ms: float | None = None
    """Time per step that the median of the other ranks spends on the same."""
    late_ms: float | None = None
    """How much longer each of its ranks takes, on average, in the median step in which it happens; null except under ``late``."""
    drawn_ms: float | None = None
    """How much longer it takes by the marks that those steps recorded and the timeline shows; null if no such work is marked."""
    drawn_as: str | None = None
    """The cause under ``late`` of which those marks show most of ``late_ms``, if they do not show it of this one."""
    awake_ms: float | None = None
    """How long training threads were running or runnable during host work on CPUs (late ranks: longer than others), and under
    ``late.cpu_starved`` if the ranks wait for a core beyond their due in most steps, more than chance explains; null elsewhere."""
    occurrence_ms: float | None = None
    """Median lateness, or duration, in the steps in which it happens."""
    steps_hit: int = 0
    """Steps in which it happens."""
    steps_seen: int = 0
    """Measured steps."""
    first_step: int | None = None
    """First step in which it happens."""
    last_step: int | None = None
    """Last step in which it happens."""
    persistence: str = "always"
    """"always" (over 80 % of the measured steps), "range" (a run of neighboring steps), "periodic" or "random"."""
    period_steps: int | None = None
    """Steps from one occurrence to the next, if periodic."""
    stands_out_in: list[int] = []
    """Outlier steps in a window too short to show how often they happen; empty if there is more evidence."""
    kinds: list[str] = []
    """Kinds of work that make different ranks late in different steps, as named under ``late`` (``turns`` only)."""
    where: list[Where] = []
    gap: str | None = None
    """Where in a training step work outside the phases happens: ``between optimizer.step() and the next batch``; null if unclear."""
    phase: str | None = None
    """The only phase in which its ranks compute longer: ``the forward pass``, ``backward()`` or ``optimizer.step()``; else null."""
    operation: str | None = None
    """What is executed there, if it has a name: a collective, a kernel, an operator, or an annotation that covers at least half of it."""
    operators: list[str] = []
    """Of time in which devices wait for launches: the torch operators that run for at least a tenth of it, the longest first (of nested
    ones the outermost)."""


IN_MS = (
    "ms_per_step",
    "low_ms_per_step",
    "high_ms_per_step",
    "alone_ms_per_step",
    "remaining_ms_per_step",
    "waiting_ms_per_step",
    "going_on_ms_per_step",
    "beside_ms_per_step",
)
"""Fields of a cost that are savings, means over the steps."""


def scaled(cost: Cost, factor: float, step_ms: float, also: tuple[str, ...] = ()) -> Cost:
    """``cost`` multiplied by ``factor``, for a mean step of ``step_ms``; the fields ``also`` are multiplied, too."""
    known = {name: ms for name in (*IN_MS, *also) if (ms := getattr(cost, name)) is not None}
    of_all = {name: factor * ms for name, ms in known.items()}
    return msgspec.structs.replace(cost, **{**of_all, **saving(of_all["ms_per_step"], step_ms)})


def saving(ms_per_step: float, step_ms: float) -> dict[str, Any]:
    """The fields of a :class:`Cost` that say how much of the mean step a cause costs."""
    rest_ms = max(step_ms - ms_per_step, _LEAST_STEP_MS)
    return {"ms_per_step": ms_per_step, "share": ms_per_step / step_ms, "speedup": step_ms / rest_ms}


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The job and its environment."""

    world_size: int | None = None
    ranks_seen: int = 0
    """Ranks in the primary recording: the step logs, or the profiler windows."""
    hosts: int | None = None
    backend: str | None = None
    device: str | None = None
    """Device on which the ranks compute: "cpu", "cuda", "rocm", "xpu", ..."""
    device_name: str | None = None
    torch: str | None = None
    nccl: str | None = None
    is_ddp: bool | None = None
    data_parallel: bool | None = None
    """torch.nn.DataParallel is used."""
    compiled: bool | None = None
    autocast: bool | None = None
    matmul_precision: str | None = None
    frameworks: dict[str, str] | None = None
    """Versions of packages with a training loop of their own that the job has imported, by name; "" where unknown."""
    debugging_variables: list[str] | None = None
    """Environment variables of any rank, as NAME=value, that find errors and make training slower; null if none were recorded."""
    disabled_paths: list[str] | None = None
    """Environment variables of any rank, as NAME=value, by which NCCL does not use a fast way between its GPUs or hosts; ways that the job
    does not have (one host, or one rank on each) do not count."""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Step times on the critical path: from the earliest start to the latest end over the ranks, per step."""

    source: str = "step-log"
    """Where step times come from: "step-log" (the whole run) or "trace" (the profiler window only)."""
    seen: int = 0
    measured: int = 0
    """Measured steps: warm-up, profiler-disturbed, evaluation and incomplete steps are excluded."""
    mean_ms: float | None = None
    median_ms: float | None = None
    p95_ms: float | None = None
    samples_per_s: float | None = None
    """Samples per second, all ranks together; not known where not all were recorded."""
    samples: float | None = None
    """Samples per rank and step: mean over the steps, median over the ranks."""
    batch_size: float | None = None
    """Samples per batch of the data loader: mean over the steps, median over the ranks."""
    batch_size_most: float | None = None
    """Mean batch size of the rank with the most samples per step, relative to the median of the others (1.0: even)."""
    input_most: float | None = None
    """Work of the rank with the largest inputs, relative to the median of the others (1.0: even): elements, or products by shapes."""
    micro_batches: float | None = None
    """Backward passes per optimizer step."""
    input_explains: float | None = None
    """How much of the variation in computation between ranks and steps is explained by input sizes (0 to 1)."""
    marked: bool | None = None
    """Whether the recording shows where a step begins: false for traces without marks of steps, which are measured as one step each."""
    truncated: bool | None = None
    """True if all measured traces are truncated, so that any step may lack events; null otherwise."""
    operators_seen: bool | None = None
    """Whether operators outside forward, backward and optimizer were recorded (profiler window): host time is then Python work."""


if TYPE_CHECKING:

    class LateFacts(msgspec.Struct, frozen=True, kw_only=True):
        def __init__(self, **costs: Cost | None) -> None: ...
        def __getattr__(self, cause: str) -> Cost | None: ...

    class SharedFacts(msgspec.Struct, frozen=True, kw_only=True):
        def __init__(self, **costs: Cost | None) -> None: ...
        def __getattr__(self, cause: str) -> Cost | None: ...

else:

    def _by_cause(name: str, causes: type[StrEnum], doc: str) -> type[msgspec.Struct]:
        """A struct with one cost for each cause of the taxonomy."""
        fields = [(cause.value, Cost | None, None) for cause in causes]
        return msgspec.defstruct(
            name, fields, frozen=True, kw_only=True, module=__name__, namespace={"__doc__": doc}
        )

    LateFacts = _by_cause(
        "LateFacts",
        LateCause,
        """What some ranks do longer than the median rank, so that all other ranks wait: each a :class:`Cost` of the excess alone.""",
    )
    SharedFacts = _by_cause(
        "SharedFacts",
        SharedCause,
        """What all ranks spend: each a :class:`Cost` of the part common to the ranks (its excess on one
    rank is in ``late``).""",
    )


class ArrivalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that arrive late at synchronizations on average, whether or not that costs time."""

    late_ranks: list[int] | None = None
    """Ranks that are late by a tenth of the step or more, and by twice as much as the median of the others, the latest first."""
    late_ms: dict[str, float] | None = None
    """Mean lateness per step, relative to the median rank."""
    late_steps: dict[str, int] | None = None
    """Steps in which the rank is late."""
    steps_seen: int | None = None
    """Steps in which the ranks' arrivals were compared: those of the profiler window where causes are measured by it."""
    on_time_saves_ms: float | None = None
    """Step time saved with the unexplained late ranks on time (what-if estimate); null if the lateness of all has a price under
    ``late``."""


class CommunicationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives: waiting and transfer, separately."""

    wait_ms: float | None = None
    """Wait in collectives for another rank (no computation running), mean over ranks."""
    transfer_ms: float | None = None
    """Exposed transfer (no computation running), mean over ranks."""
    total_transfer_ms: float | None = None
    """All transfer, hidden or not, mean over ranks."""
    exposed_ms: float | None = None
    """Time in collectives without concurrent computation, waiting included, median rank; known even if ranks are not matched."""
    hidden_share: float | None = None
    """Share of the time in collectives, waiting included, that computation hides."""
    bytes_per_step: float | None = None
    """Bytes that a rank contributes to collectives per step."""
    sharded_share: float | None = None
    """Share of the time in collectives that gather and scatter sharded parameters and gradients (FSDP, ZeRO), 0 to 1."""
    collectives_per_step: float | None = None
    """Collectives per step, median rank."""
    operations_per_step: dict[str, float] | None = None
    """The same by operation, the most frequent first."""
    operation_bytes_per_step: dict[str, float] | None = None
    """Bytes of these that a rank contributes per step, of the operations whose messages' sizes are known."""
    bus_gb_per_s: float | None = None
    """Bus bandwidth (as in nccl-tests) of large messages: of the size class from 1 MiB on with the longest transfer time."""
    best_bus_gb_per_s: float | None = None
    """Best bus bandwidth of a size class (three messages or more, not larger ones) in groups of as many ranks and hosts."""
    latency_us: float | None = None
    """Fixed cost of one message: intercept of transfer time over bytes."""
    matched: int | None = None
    unmatched: int | None = None
    ranks_meet: bool | None = None
    """Whether the measured cycles end with collectives of the ranks. If not, which steps of different ranks are the same is unknown."""
    clock_error_us: float | None = None
    """Clock alignment error between ranks, at most."""
    slow_link_ranks: list[int] | None = None
    """Ranks of process groups whose transfers are persistently slower than those of comparable groups; null without any."""


class BucketFacts(msgspec.Struct, frozen=True, kw_only=True):
    """DDP's gradient buckets."""

    per_sync: float | None = None
    """Buckets per gradient reduction."""
    median_bytes: float | None = None
    total_bytes: float | None = None
    cap_bytes: float | None = None
    largest_parameter_bytes: float | None = None
    """Size of the largest parameter of the largest DDP module: its bucket cannot be smaller."""
    favoured_cap_bytes: float | None = None
    """Best bucket size by the measured latency and bandwidth."""
    backward_ms: float | None = None
    first_ready_share: float | None = None
    """Part of the backward pass after which the first bucket is ready."""
    tail_ms: float | None = None
    """Time from the last rank's last gradient to the end of the last reduction."""
    syncs_per_step: float | None = None
    """Backward passes per optimizer step in which gradients were reduced."""
    barriers_per_step: float | None = None
    collectives_per_step: float | None = None
    """Blocking collectives called from Python per step, without barriers."""


class LoaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the loader that feeds the training loop."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    batch_size: int | None = None
    sampler: str | None = None
    where: Where | None = None
    wait_ms: float | None = None
    """Time in the loader's ``next`` per step, median rank."""
    ready_batches: float | None = None
    """Mean number of batches ready in the queue, on the rank with the fewest."""
    fetch_share: float | None = None
    """Part of the time in ``next`` that fetching ready batches takes: the lower quartile of its durations, times their number. Smallest of
    all ranks. Of simulated jobs whose batches are ready, 95 % have 0.26 or more, half
    0.56 or more: fetches scatter, and the machine is busy."""
    ready_ms: float | None = None
    """Mean time that a batch of that rank is ready before the training thread takes it: ``ready_batches`` times the mean time between two
    requests (Little's law)."""
    computing_share: float | None = None
    """Share of the preparation of batches that is computing, or being ready to compute, on the rank that waits longest; null with workers
    that were not recorded."""
    workers_rank: int | None = None
    """Rank whose workers the following facts describe: the one that waits longest; null without workers, or if none was recorded."""
    batch_ms: float | None = None
    """Time that a worker needs for a batch, mean."""
    batch_bytes: float | None = None
    """Bytes of a batch's tensors, which pass from a worker through shared memory, mean."""
    workers_busy_share: float | None = None
    """Share of the time in which a worker prepares batches, mean."""
    workers_starved_share: float | None = None
    """Share of the preparation of batches in which a worker has no CPU."""
    worker_where: list[Where] = []
    """Lines at which workers spend most of the preparation of batches; of the slow worker, if there is one."""
    slow_worker: int | None = None
    """Number of the worker whose batches take longer than those of the others; null if none do."""
    slow_worker_ms: float | None = None
    """Time that this worker needs for a batch, mean."""
    other_workers_ms: float | None = None
    """Time that the other workers need for a batch, mean."""


class DdpFacts(msgspec.Struct, frozen=True, kw_only=True):
    """DDP's settings."""

    parameters_bytes: float | None = None
    """Size of all parameters of the model."""
    find_unused_parameters: bool | None = None
    unused_parameter_bytes: float | None = None
    search_ms: float | None = None
    """Time per step to find unused parameters: on a device, the part that its work does not hide; otherwise with the message about
    them."""
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    broadcast_buffers: bool | None = None
    buffer_bytes: float | None = None
    comm_hook: str | None = None
    has_sync_bn: bool | None = None
    """Whether the model has SyncBatchNorm layers, whose forward and backward communicate."""
    where: Where | None = None


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, from kernels in the window and from NVML. All null for a CPU job."""

    busy_share: float | None = None
    """Share of the step in which a computation kernel runs, median rank."""
    idle_share: float | None = None
    """Share of the step in which the device neither computes nor is in a collective, median rank."""
    kernels_per_step: float | None = None
    """Computation kernels per step, median rank."""
    optimizer_kernels_share: float | None = None
    """Share of the kernels that are launched inside an optimizer's step."""
    median_kernel_us: float | None = None
    """Median duration of a computation kernel."""
    tensor_core_share: float | None = None
    """Share of matrix-multiplication kernel time that uses tensor cores."""
    matmul_share: float | None = None
    """Share of computation kernel time in matrix multiplications and convolutions."""
    layout_share: float | None = None
    """Share of computation kernel time in which cuDNN converts the memory layout of images."""
    pageable_copy_ms: float | None = None
    copy_bytes_per_step: float | None = None
    compute_capability: float | None = None
    utilization_percent: float | None = None
    """Mean of NVML's GPU utilization over the ranks' GPUs."""
    memory_used_share: float | None = None
    """Largest share of device memory in use on any rank."""
    shared_ranks: list[int] | None = None
    """Ranks on whose GPU another rank computes, too, by the GPUs' UUIDs; null where fewer than two ranks show on which GPU their kernels
    ran."""
    per_host: int | None = None
    """GPUs that NVML sees on the host with the fewest."""
    throttled_ranks: list[int] | None = None
    throttle_reasons: list[str] | None = None
    throttled_share: float | None = None
    """Share of the samples with lowered clocks, on those ranks."""
    heat_or_power_ranks: list[int] | None = None
    """Ranks whose GPU has clocks lowered because of heat or the power supply. (A power cap set by software does not count.)"""
    heat_or_power_reasons: list[str] | None = None
    heat_or_power_share: float | None = None
    """Share of the samples with clocks lowered for such a reason, on the one of those ranks with most."""
    sm_clock_share: float | None = None
    """Mean SM clock of the slowest GPU relative to the median of the others."""
    narrow_link_ranks: list[int] | None = None
    """Ranks whose PCIe link is narrower than it could be."""
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    error_ranks: list[int] | None = None
    """Ranks whose GPU counted uncorrectable ECC errors or Xids during the run. Xids of programs (13, 31, 43, 45, 68, 109) do not count."""
    errors: list[str] | None = None
    temperature_max_celsius: float | None = None


class ProgramFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A program other than the ranks and their workers: all its processes on a host, means while the steps ran."""

    name: str
    cores: float
    processes: float
    rank: float | None = None
    """The rank that started it; null if none did."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts, while the steps after the warm-up ran. The busiest host is the one with the smallest share of idle cores."""

    cores: float | None = None
    numa_nodes: float | None = None
    """NUMA nodes with CPUs of the busiest host."""
    ranks_per_host: float | None = None
    cpu_percent: float | None = None
    """Mean CPU utilization of the busiest host."""
    idle_cores: float | None = None
    """Idle cores on the busiest host; null where affinity or a CPU limit keeps the job from some of its cores."""
    other_cores: float | None = None
    """Cores of the busiest host that processes other than the ranks and their workers use."""
    other_programs: list[ProgramFacts] = []
    """Programs other than the ranks and their workers that use most CPU on the busiest host, most first; above 0.1 core, three at most."""
    run_delay_share: float | None = None
    """Share of the step in which the training thread was runnable but had no CPU, on the worst rank."""
    thread_cpu_ms: float | None = None
    """Time per step in which the training thread ran on a CPU, on the rank with most of it; null in jobs on devices, where another
    thread runs the backward pass."""
    threads_per_rank: float | None = None
    memory_used_share: float | None = None
    swap_bytes_per_s: float | None = None
    io_wait_percent: float | None = None


class PipelineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Pipeline stages and replicas, from tables of operations."""

    stages: int | None = None
    replicas: int | None = None
    slowdown: float | None = None
    """Step time relative to a replay in which every operation takes its typical time; 1.0 without stragglers."""
    slow_stages: list[int] | None = None
    """Stages that are slow on every replica."""
    stage: Cost | None = None
    """Computation of the slow stages beyond that of typical ones."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of a run. Rules address them by path, such as ``late.data.share`` or ``loader.num_workers``."""

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
    memory: MemoryFacts = MemoryFacts()
    pipeline: PipelineFacts = PipelineFacts()
    hang: HangFacts = HangFacts()
    run: RunFacts = RunFacts()
    breakdown: dict[str, float] = {}
    """Share of the critical step time per part; sums to 1."""
