"""Process groups, and collectives between the simulated ranks: arrivals and common ends. With Gloo on CPUs, the training thread issues
collectives and two threads per rank execute them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .machine import GLOO_THREADS, DeviceEvent, HostEvent, Machine
from .model import Config, Effects, Noise

ABBREVIATED_FROM = 30
"""Torch abbreviates lists of more than 30 ranks in the arguments of events."""


@dataclass(frozen=True)
class Group:
    """A process group. Groups may have the same name if their members differ."""

    kind: str
    """"world", "data", "tensor" or "host"."""
    name: str
    description: str
    ranks: tuple[int, ...]
    stream: int

    @property
    def text(self) -> str:
        """The ranks in torch's format for arguments."""
        texts = [str(rank) for rank in self.ranks]
        if len(texts) > ABBREVIATED_FROM:
            texts = [*texts[: ABBREVIATED_FROM - 1], "...", texts[-1]]
        return f"[{', '.join(texts)}]"

    @property
    def stride(self) -> int:
        """Distance between neighbouring ranks."""
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1


def process_groups(config: Config) -> list[Group]:
    """All groups. Tensor-parallel groups contain consecutive ranks, data-parallel ones every n-th rank."""
    size, width = config.world_size, config.tensor_parallel
    groups = [Group("world", "0", "default_pg", tuple(range(size)), 20)]
    if width > 1:
        for first in range(width):
            groups.append(Group("data", str(1 + first), "mesh_dp", tuple(range(first, size, width)), 24))
        for index, first in enumerate(range(0, size, width)):
            ranks = tuple(range(first, first + width))
            groups.append(Group("tensor", str(1 + width + index), "mesh_tp", ranks, 28))
    first = 0
    for index, count in enumerate(config.hosts if config.within_hosts_first else ()):
        ranks = tuple(range(first, first + count))
        groups.append(Group("host", str(len(groups)), f"host_{index}", ranks, 32))
        first += count
    return groups


ANNOTATIONS = {"allreduce": "nccl:all_reduce", "barrier": "nccl:all_reduce_barrier"}
OPERATORS = {"allreduce": "c10d::allreduce_", "barrier": "c10d::barrier"}
KERNEL = "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass
class Collective:
    """A collective of a group. Times are microseconds on the true clock, by rank."""

    group: Group
    sequence: int
    step: int
    micro_batch: int
    purpose: str
    """"bucket 0", "metric" or "barrier"."""
    operation: str
    elements: int
    element_bytes: int = 4
    issued_us: dict[int, float] = field(default_factory=dict)
    ready_us: dict[int, float] = field(default_factory=dict)
    """When the rank's part could start if its communication stream were free."""
    after: dict[int, Collective] = field(default_factory=dict)
    """By rank, the collective of another group for whose end its part waits."""
    arrival_us: dict[int, float] = field(default_factory=dict)
    end_us: dict[int, float] = field(default_factory=dict)
    identity: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(External id, correlation id) by rank; with Gloo, the External ids of the operator and of the annotation."""

    @property
    def done(self) -> bool:
        """Whether all ranks have arrived."""
        return bool(self.end_us)

    @property
    def last_arrival_us(self) -> float:
        """Time of the last rank's arrival."""
        return max(self.arrival_us.values())


class Network:
    """The network of a process group. A collective is resolved when the last rank has called it."""

    def __init__(self, group: Group, config: Config, noise: Noise, effects: Effects) -> None:
        self.group = group
        self.config = config
        self.noise = noise
        self.effects = effects
        self.collectives: list[Collective] = []
        self.machines: dict[int, Machine] = {}
        self._called = dict.fromkeys(group.ranks, 0)
        self._stream_free_us = dict.fromkeys(group.ranks, float("-inf"))

    def call(
        self,
        machine: Machine,
        step: int,
        micro_batch: int,
        purpose: str,
        operation: str,
        elements: int,
        after: Collective | None = None,
    ) -> Collective:
        """Issue the rank's next collective from its current thread. The returned collective may be unresolved."""
        rank, sequence = machine.rank, self._called[machine.rank]
        self._called[rank] += 1
        if sequence == len(self.collectives):
            self.collectives.append(
                Collective(self.group, sequence, step, micro_batch, purpose, operation, elements)
            )
        collective = self.collectives[sequence]
        if collective.purpose != purpose:
            raise RuntimeError(f"rank {rank} calls {purpose!r} where others call {collective.purpose!r}")
        if after is not None:
            collective.after[rank] = after
        launch_us = self.config.collective_launch_us * self.noise.factor(
            "collective launch", self.group.name, rank, sequence, scale=3.0
        )
        self._launch(machine, collective, launch_us)
        if len(collective.ready_us) == len(self.group.ranks):
            self._resolve(collective)
        return collective

    def _launch(self, machine: Machine, collective: Collective, launch_us: float) -> None:
        """Simulate the host's calls from c10d to the kernel launch, on the recording thread."""
        args = self.metadata(collective, on_operator=True) if self.config.operator_metadata else ""
        collective.issued_us[machine.rank] = machine.now_us
        with machine.span("cpu_op", OPERATORS[collective.operation], shape_of(collective)):
            machine.work(0.15 * launch_us)
            with machine.span("cpu_op", "record_param_comms", args) as external:
                machine.runtime("cudaEventRecord", 0.04 * launch_us, external)
                machine.runtime("cudaStreamWaitEvent", 0.03 * launch_us, external)
                with machine.span("user_annotation", ANNOTATIONS[collective.operation]):
                    machine.work(0.3 * launch_us)
                    correlation = machine.runtime("cudaLaunchKernelExC", 0.25 * launch_us, external)
                    launched_us = machine.now_us + self.config.launch_latency_us
                    machine.work(0.13 * launch_us)
            machine.work(0.1 * launch_us)
        collective.ready_us[machine.rank] = max(launched_us, machine.compute_free_us + 1.0)
        collective.identity[machine.rank] = (external, correlation)

    def _resolve(self, collective: Collective) -> None:
        """Set arrivals and ends, and put the kernels on the ranks' communication streams."""
        for rank, ready_us in collective.ready_us.items():
            after = collective.after.get(rank)
            over_us = self._stream_free_us[rank] if after is None else after.end_us[rank]
            collective.arrival_us[rank] = max(ready_us, self._stream_free_us[rank] + 1.0, over_us + 1.0)
        common_end_us = collective.last_arrival_us + self.wire_us(collective)
        for rank in self.group.ranks:
            machine = self.machines[rank]
            end_us = common_end_us + self.end_jitter_us(rank, collective)
            collective.end_us[rank] = end_us
            self._stream_free_us[rank] = end_us
            if machine.recording_since <= collective.issued_us[rank]:
                self._record(machine, collective)

    def end_jitter_us(self, rank: int, collective: Collective) -> float:
        """Delay of the rank's own end after the common end."""
        late = abs(
            float(self.noise.draws("end", self.group.name, rank, collective.sequence).standard_normal())
        )
        return min(late, 4.0) * self.config.end_jitter_us

    def wire_us(self, collective: Collective) -> float:
        """Latency plus the ring's traffic divided by the bus bandwidth, with the same noise for all ranks."""
        size, config = len(self.group.ranks), self.config
        traffic_bytes = 2 * (size - 1) / size * collective.elements * collective.element_bytes
        wire_us = config.link_latency_us + traffic_bytes / (config.link_bandwidth_gbps * 1000.0)
        for plant in self.effects.acting("slow_link", None, collective.step):
            if not plant.ranks or set(plant.ranks) & set(self.group.ranks):
                wire_us *= plant.factor
        return wire_us * self.noise.factor("wire", self.group.name, collective.sequence)

    def _record(self, machine: Machine, collective: Collective) -> None:
        rank = machine.rank
        external, correlation = collective.identity[rank]
        start_us, end_us = collective.arrival_us[rank], collective.end_us[rank]
        args = self.metadata(collective) if self.config.kernel_metadata else ""
        kernel = KERNEL.format(dtype="f32")
        annotation = ANNOTATIONS[collective.operation]
        machine.device_events.append(
            DeviceEvent("kernel", kernel, self.group.stream, start_us, end_us, external, correlation, args)
        )
        machine.device_events.append(
            DeviceEvent(
                "gpu_user_annotation", annotation, self.group.stream, start_us, end_us, external, 0, ""
            )
        )
        last_us = collective.last_arrival_us
        if collective.operation == "barrier":
            machine.mark("barrier", start_us, end_us)
        else:
            machine.mark("comm_wait", start_us, last_us)
            machine.mark("comm_transfer", last_us, end_us)

    def metadata(self, collective: Collective, on_operator: bool = False) -> str:
        """The NCCL arguments as Kineto writes them on kernels and on record_param_comms."""
        group = self.group
        text = (
            f',"Collective name":"{collective.operation}","In msg nelems":{collective.elements}'
            f',"Out msg nelems":{collective.elements},"Group size":{len(group.ranks)},"dtype":"Float"'
            f',"In split size":"[]","Out split size":"[]","Process Group Name":"{group.name}"'
            f',"Process Group Description":"{group.description}","Process Group Ranks":"{group.text}"'
        )
        if on_operator:
            text += f',"Global rank start":{group.ranks[0]},"Global rank stride":{group.stride}'
        if self.config.include_seq:
            text += f',"Seq":{collective.sequence}'
        return text


def shape_of(collective: Collective) -> str:
    """ "Input Dims" of the c10d operator; a barrier's tensor has one element."""
    dims = f"[[{collective.elements}]]" if collective.operation == "allreduce" else "[1]"
    return f',"Input Dims":[{dims},[],[],[]]'


GLOO_ANNOTATIONS = {"allreduce": "gloo:all_reduce", "barrier": "gloo:barrier"}
DEQUEUE_US = 60.0


class GlooNetwork(Network):
    """One process group over Gloo."""

    def __init__(self, group: Group, config: Config, noise: Noise, effects: Effects) -> None:
        super().__init__(group, config, noise, effects)
        self._thread_free_us = {rank: dict.fromkeys(GLOO_THREADS, float("-inf")) for rank in group.ranks}

    def _launch(self, machine: Machine, collective: Collective, launch_us: float) -> None:
        rank = machine.rank
        name, args = OPERATORS[collective.operation], shape_of(collective)
        collective.issued_us[rank] = collective.ready_us[rank] = machine.now_us
        with machine.span("cpu_op", name, args) as external:
            machine.work(launch_us)
        collective.identity[rank] = (external, machine.next_external())

    def _resolve(self, collective: Collective) -> None:
        collective.arrival_us.update(collective.issued_us)
        begin_us: dict[int, float] = {}
        thread_of: dict[int, int] = {}
        for rank, issued_us in collective.issued_us.items():
            free_us = self._thread_free_us[rank]
            thread = thread_of[rank] = min(free_us, key=free_us.__getitem__)
            begin_us[rank] = max(issued_us + DEQUEUE_US, free_us[thread] + 5.0)
        common_end_us = max(begin_us.values()) + self.wire_us(collective)
        for rank in self.group.ranks:
            machine = self.machines[rank]
            end_us = common_end_us + self.end_jitter_us(rank, collective)
            collective.end_us[rank] = self._thread_free_us[rank][thread_of[rank]] = end_us
            if machine.recording_since <= collective.issued_us[rank]:
                args = f',"Input Dims":[[{collective.elements}]]'
                name, external = GLOO_ANNOTATIONS[collective.operation], collective.identity[rank][1]
                where = (thread_of[rank], begin_us[rank], end_us)
                machine.host_events.append(HostEvent("user_annotation", name, *where, external, 0, args))
