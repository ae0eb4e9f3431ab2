"""Simulates a GPU job with faults: each rank's host issues kernels, its device runs them in order, and collectives wait for all
members."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Planned:
    """A fault of size ``us`` in every ``every``-th step. ``ranks``: None for all ranks equally."""

    kind: str
    ranks: tuple[int, ...] | None
    us: float
    every: int = 1
    first: int = 0

    def hits(self, rank: int, step: int) -> bool:
        return (self.ranks is None or rank in self.ranks) and step % self.every == self.first


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What the traces contain."""

    operators: bool
    stacks: bool
    runtime: bool
    shapes: bool
    nccl_metadata: bool
    sequence_numbers: bool
    step_annotations: bool
    lost_share: float
    first_step: tuple[int, ...]
    last_step: tuple[int, ...]
    cut: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A job. Times are microseconds of true time. ``layers_us``: the forward pass's large kernels, by layer."""

    seed: int
    host_of: tuple[int, ...]
    layers_us: tuple[float, ...]
    layer_bytes: tuple[int, ...]
    bucket_of: tuple[int, ...]
    bytes_per_us: float
    latency_us: float
    hierarchical: bool
    launch_us: float
    data_us: float
    kernel_noise: float
    end_spread: float
    host_noise: float
    reads_loss: bool
    steps: int
    offset_us: tuple[float, ...]
    drift_ppm: tuple[float, ...]
    recorded: Recorded
    faults: tuple[Planned, ...] = ()
    short: bool = False
    """Whether the window has two to four steps."""

    @property
    def world(self) -> int:
        return len(self.host_of)

    def on_host(self, host: int) -> tuple[int, ...]:
        return tuple(rank for rank, its in enumerate(self.host_of) if its == host)


MAIN, BACKWARD = 0, 1
COMPUTE, INTRA, WIDE = 7, 20, 24
START_US = 2.0
CPU_PER_OP = 2.0
STRETCH = ("slow-kernels", "throttled", "uneven")


@dataclasses.dataclass(slots=True)
class Event:
    """An event that a profiler would record. ``thread``: a thread of the host, or a stream of the device."""

    category: str
    name: str
    thread: int
    start: float
    end: float
    correlation: int = 0
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The start of a transfer on a rank: when its gradients are ready, when the host issued it, and the calls' correlation ids."""

    at: float
    issued: float
    intra: int
    wide: int


class Rank:
    """The state of one rank's host and device."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        self.events: list[Event] = []
        self.host = 1000.0 * rank
        self.device = self.host
        self.comm = {INTRA: self.host, WIDE: self.host}
        self.correlation = 0
        self.step_start: list[float] = []
        self.step_end: list[float] = []
        self.scale = 1.0
        self.batch = 64
        self.kernel_noise = np.ones(1)
        self.host_noise = np.ones(1)
        self.issued = 0

    def begin(self, step: int) -> None:
        """Begin a step. All its noise is drawn at once, so that faults do not shift it."""
        random = np.random.default_rng([self.setup.seed, self.rank, step])
        self.kernel_noise = 1 + self.setup.kernel_noise * random.standard_normal(400).clip(-3, 3)
        self.host_noise = 1 + self.setup.host_noise * random.exponential(1.0, 400)
        self.issued = 0
        self.step_start.append(self.host)

    def note(self, category: str, name: str, start: float, thread: int = MAIN, **more: Any) -> None:
        """Record an event of the host from ``start`` until now."""
        self.events.append(Event(category, name, thread, start, self.host, 0, more))

    def call(self, name: str, start: float, end: float, thread: int) -> int:
        self.correlation += 1
        self.events.append(Event("cuda_runtime", name, thread, start, end, self.correlation))
        return self.correlation

    def op(
        self, name: str, kernel: str, us: float, thread: int = MAIN, dims: Any = None, steady: bool = False
    ) -> None:
        """An operator that launches one kernel. ``steady``: it belongs to a fault and uses none of the step's noise."""
        noise = 1.0 if steady else float(self.host_noise[self.issued % 400])
        start = self.host
        launch = self.setup.launch_us * noise
        begin = self.host + CPU_PER_OP
        self.host = begin + launch
        correlation = self.call("cudaLaunchKernel", begin, self.host, thread)
        self.host += CPU_PER_OP
        self.note("cpu_op", name, start, thread, **({"Input Dims": dims} if dims else {}))
        us *= 1.0 if steady else float(self.kernel_noise[self.issued % 400])
        if not steady:
            self.issued += 1
        self.run("kernel", kernel, us, begin + launch, correlation)

    def run(
        self, category: str, kernel: str, us: float, issued: float, correlation: int, **more: Any
    ) -> None:
        start = max(issued + START_US, self.device)
        self.device = start + us
        self.events.append(Event(category, kernel, COMPUTE, start, self.device, correlation, more))

    def copy(self, us: float, size: int) -> None:
        start = self.host
        self.host += 8.0
        correlation = self.call("cudaMemcpyAsync", start + 2, self.host, MAIN)
        self.note("cpu_op", "aten::copy_", start)
        self.run("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", us, self.host, correlation, bytes=size)

    def wait(self, frame: str | None = None) -> None:
        """``.item()``: the host waits for all work that it has issued."""
        start = self.host
        self.host += 5.0
        correlation = self.call("cudaMemcpyAsync", start + 2, self.host, MAIN)
        self.run("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1.5, self.host, correlation, bytes=4)
        begin = self.host + 1.0
        self.host = max(begin + 3.0, self.device + 3.0)
        self.call("cudaStreamSynchronize", begin, self.host, MAIN)
        self.note("cpu_op", "aten::_local_scalar_dense", start)
        self.note("cpu_op", "aten::item", start)
        if frame:
            self.note("python_function", frame, start)

    def sleep(self, us: float, frame: str | None) -> None:
        """Host work outside operators. ``frame`` is in the trace if stacks are recorded."""
        start = self.host
        self.host += us
        if frame:
            self.note("python_function", frame, start)


def run(setup: Setup, faults: Iterable[Planned] | None = None) -> list[Rank]:
    """Simulate all steps; returns the ranks. ``faults`` replace those of the setup, if given."""
    chosen = tuple(setup.faults if faults is None else faults)
    ranks = [Rank(setup, rank) for rank in range(setup.world)]
    for step in range(setup.steps):
        for rank in ranks:
            active = [fault for fault in chosen if fault.hits(rank.rank, step)]
            _until_backward(rank, step, active)
        buckets = _buckets(setup, chosen)
        ready = {}
        for rank in ranks:
            active = [fault for fault in chosen if fault.hits(rank.rank, step)]
            ready[rank.rank] = _backward(rank, active, buckets)
        _reduce(setup, ranks, ready, buckets, chosen, step)
        for rank in ranks:
            active = [fault for fault in chosen if fault.hits(rank.rank, step)]
            _finish(rank, step, active)
    return ranks


def _until_backward(rank: Rank, step: int, active: list[Planned]) -> None:
    setup = rank.setup
    sized = {fault.kind: fault for fault in active}
    if not setup.reads_loss and step >= 2:
        start, rank.host = rank.host, max(rank.host + 2.0, rank.step_end[step - 2])
        rank.call("cudaEventSynchronize", start, rank.host, MAIN)
    rank.begin(step)
    start = rank.host
    late = sized.get("late-data") or sized.get("late-data-all")
    rank.sleep(setup.data_us * float(rank.host_noise[-1]), None)
    if late:
        rank.sleep(late.us, "data.py(21): __getitem__")
    rank.note("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start)
    long_copy = sized.get("long-copy")
    rank.copy(30.0 + (long_copy.us if long_copy else 0.0), 400_000)
    if "host-stall" in sized:
        rank.sleep(sized["host-stall"].us, "metrics.py(14): summarise")
    if "rare-stall" in sized:
        rank.sleep(sized["rare-stall"].us, "snapshots.py(9): tidy")
    compute = (1.06 + 2.06) * sum(setup.layers_us)
    rank.scale = 1.0 + sum(fault.us for fault in active if fault.kind in STRETCH) / compute
    begin = rank.host
    rank.batch = round(64 * (rank.scale if "uneven" in sized else 1.0))
    waits, layers = sized.get("syncs"), len(setup.layers_us)
    for layer, us in enumerate(setup.layers_us):
        rank.op(
            "aten::addmm",
            "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
            us * rank.scale,
            dims=[[rank.batch, 1024], [1024, 1024]],
        )
        rank.op("aten::relu", ELEMENTWISE, 0.06 * us * rank.scale)
        if waits and layer in (1, layers // 4 + 1, layers // 2 + 1, 3 * layers // 4 + 1):
            rank.wait("checks.py(30): is_finite")
            rank.sleep(waits.us, "checks.py(30): is_finite")
    if "extra-forward" in sized:
        _compute_more(rank, sized["extra-forward"].us)
    rank.note("python_function", "model.py(40): forward", begin)
    rank.note("user_annotation", "DistributedDataParallel.forward", begin)


def _compute_more(rank: Rank, us: float) -> None:
    """A loop of matrix products that takes ``us`` on the device."""
    for _ in range(4):
        rank.op(
            "aten::mm",
            "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x5_nn",
            us / 4,
            dims=[[64, 512], [512, 512]],
            steady=True,
        )


ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::relu>(int)"


def _buckets(setup: Setup, faults: tuple[Planned, ...]) -> list[list[tuple[int, float]]]:
    """For each layer, the (bucket, bytes) of the transfers that may start when its gradients are ready."""
    layers = len(setup.layers_us)
    small = next((fault for fault in faults if fault.kind == "small-buckets"), None)
    starts: list[list[tuple[int, float]]] = [[] for _ in range(layers)]
    if small:
        pieces = max(1, round(small.us / layers))
        for layer in range(layers):
            starts[layer] = [(layer, setup.layer_bytes[layer] / pieces)] * pieces
        return starts
    for bucket in sorted(set(setup.bucket_of)):
        members = [layer for layer in range(layers) if setup.bucket_of[layer] == bucket]
        starts[min(members)].append((bucket, sum(setup.layer_bytes[layer] for layer in members)))
    return starts


def _backward(rank: Rank, active: list[Planned], buckets: list[list[tuple[int, float]]]) -> list[Ready]:
    """Issue the backward pass. Returns the start of each transfer."""
    setup = rank.setup
    sized = {fault.kind: fault for fault in active}
    rank.host += 15.0
    begin = rank.host
    ready = []
    for layer in range(len(setup.layers_us) - 1, -1, -1):
        us = setup.layers_us[layer] * rank.scale
        dims = [[rank.batch, 1024], [1024, 1024]]
        start = rank.host
        rank.op("aten::mm", "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nt", us, BACKWARD, dims)
        rank.op("aten::mm", "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn", us, BACKWARD, dims)
        rank.op("aten::threshold_backward", ELEMENTWISE, 0.06 * us, BACKWARD)
        rank.note("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", start, BACKWARD)
        for _ in buckets[layer]:
            ready.append(_issue(rank))
    if "no-overlap" in sized:
        ready = [dataclasses.replace(one, at=rank.device) for one in ready]
    rank.note("python_function", "torch/_tensor.py(400): backward", begin)
    return ready


def _issue(rank: Rank) -> Ready:
    start = rank.host
    rank.host += 4.0
    calls = []
    for _ in range(2 if rank.setup.hierarchical else 1):
        launch = rank.host
        rank.host += rank.setup.launch_us
        calls.append(rank.call("cudaLaunchKernelExC", launch, rank.host, BACKWARD))
        rank.host += 2.0
        rank.note("cpu_op", "record_param_comms", launch, BACKWARD)
        rank.note("cpu_op", "c10d::allreduce_", launch, BACKWARD)
    return Ready(rank.device, start, calls[0], calls[-1])


def _reduce(
    setup: Setup,
    ranks: list[Rank],
    ready: dict[int, list[Ready]],
    buckets: list[list[tuple[int, float]]],
    faults: tuple[Planned, ...],
    step: int,
) -> None:
    """Simulate all transfers of a step. Each starts on a rank when it is ready, and ends together in its group."""
    sizes = [size for layer in reversed(buckets) for _, size in layer]
    hosts = sorted(set(setup.host_of))
    slow = {rank for fault in faults if fault.kind == "slow-link" for rank in fault.ranks or ()}
    factor = {fault.kind: 1 + fault.us for fault in faults}.get("slow-link", 1.0)
    random = np.random.default_rng([setup.seed, 99, step])
    for number, size in enumerate(sizes):
        jitter = 1 + 0.03 * float(random.exponential())
        arrived = {
            rank.rank: max(ready[rank.rank][number].at, ready[rank.rank][number].issued + 4.0)
            for rank in ranks
        }
        if setup.hierarchical:
            for host in hosts:
                members = setup.on_host(host)
                pace = factor if slow.intersection(members) else 1.0
                us = (setup.latency_us + size / setup.bytes_per_us) * jitter * pace
                arrived.update(
                    _collective(ranks, members, arrived, ready, number, size, us, INTRA, host + 1, random)
                )
        us = (setup.latency_us + size / setup.bytes_per_us) * jitter * (0.3 if setup.hierarchical else 1.0)
        everyone = tuple(range(setup.world))
        _collective(ranks, everyone, arrived, ready, number, size, us, WIDE, 0, random)
    for rank in ranks:
        rank.device = max(rank.device, rank.comm[WIDE])


def _collective(
    ranks: list[Rank],
    members: tuple[int, ...],
    arrived: dict[int, float],
    ready: dict[int, list[Ready]],
    number: int,
    size: float,
    us: float,
    stream: int,
    group: int,
    random: np.random.Generator,
) -> dict[int, float]:
    """Simulate a collective: each member's kernel lasts from its own arrival to about the common end. Returns the ends by rank."""
    starts = {rank: max(arrived[rank], ranks[rank].comm[stream]) + 1.0 for rank in members}
    end = max(starts.values()) + us
    early = ranks[0].setup.end_spread * us * random.random(len(members))
    ends = dict(zip(members, (end - early).tolist(), strict=True))
    for rank in members:
        at, one = ranks[rank], ready[rank][number]
        at.comm[stream] = ends[rank]
        at.events.append(
            Event(
                "kernel",
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                stream,
                starts[rank],
                ends[rank],
                one.intra if stream == INTRA else one.wide,
                {"group": group, "members": members, "elements": int(size / 4)},
            )
        )
    return ends


def _finish(rank: Rank, step: int, active: list[Planned]) -> None:
    setup = rank.setup
    sized = {fault.kind: fault for fault in active}
    begin = rank.host
    for _ in range(2):
        rank.op(
            "aten::_foreach_add_",
            "void at::native::multi_tensor_apply_kernel<float>(int)",
            0.05 * sum(setup.layers_us),
        )
    rank.note("user_annotation", "Optimizer.step#SGD.step", begin)
    extra, start = sized.get("extra-after"), rank.host
    if extra:
        _compute_more(rank, extra.us)
        rank.note("python_function", "metrics.py(28): confusion", start)
    if setup.reads_loss:
        rank.wait("train.py(44): train_step")
    if "python-all" in sized:
        rank.sleep(sized["python-all"].us, "reporting.py(17): write_row")
    rank.step_end.append(rank.device)
    rank.note("python_function", "train.py(44): train_step", rank.step_start[step])
    rank.note("user_annotation", f"ProfilerStep#{step}", rank.step_start[step])


def step_us(ranks: list[Rank], first: int, last: int) -> float:
    """Mean step time between the end of step ``first - 1`` and the end of step ``last``, on the devices of all ranks."""
    ends = [max(rank.step_end[step] for rank in ranks) for step in (first - 1, last)]
    return (ends[1] - ends[0]) / (last - first + 1)
