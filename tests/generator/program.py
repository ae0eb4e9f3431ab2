"""The training loop of a rank: the work of a DDP step, in the order of a real one.

Each step is a generator. It yields a collective if the accelerator's further timeline depends on that collective's end. The scheduler in
:mod:`.simulate` resumes it when all ranks have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .collectives import Collective, Network
from .kernels import Launch, duration_shares, operators, shape_args
from .machine import MAIN_THREAD, HookEvent, Machine
from .model import Config, Effects, Noise, Plant

Waits = Iterator[Collective]
PINNED_GBPS = 20.0
PAGEABLE_GBPS = 6.0
EXTRA_KERNELS = 12
"""Number of kernels of a plant that computes outside the phases."""


@dataclass
class RankProgram:
    """The program of a rank. ``step_start_us``: start of each step, then the end of the last step."""

    config: Config
    machine: Machine
    networks: dict[str, Network]
    """The rank's groups by kind: "world", "data", and "tensor" or "host" if they exist."""
    noise: Noise
    effects: Effects
    record: bool = True
    step_start_us: list[float] = field(default_factory=list)
    last_end_us: float | None = None
    """When the accelerator completes the last issued optimizer step."""

    def run(self) -> Waits:
        """All steps, including warm-up steps, which have negative numbers."""
        config, machine = self.config, self.machine
        for step in range(-config.warmup_steps, config.steps):
            if step == 0 and self.record:
                machine.recording_since = machine.now_us
            if step >= 0:
                self.step_start_us.append(machine.now_us)
            number = step + config.warmup_steps
            with machine.span("user_annotation", f"ProfilerStep#{number}"):
                yield from self._step(step)
            machine.work(2.0)
        self.step_start_us.append(machine.now_us)
        machine.synchronize()

    def _step(self, step: int) -> Waits:
        config = self.config
        for micro in range(config.accumulation):
            self._load(step, micro)
            if micro == 0:
                self._zero_grad(step)
                self._extra_kernels("kernels_before_forward", step)
            yield from self._forward(step, micro)
            if micro == 0:
                self._extra_kernels("kernels_before_backward", step)
            synchronised = micro == config.accumulation - 1 or not config.no_sync
            yield from self._backward(step, micro, synchronised)
        if config.reads_last_step and self.last_end_us is not None:
            self.machine.wait_until("cudaEventSynchronize", self.last_end_us, self.machine.next_external())
        yield from self._barriers(step)
        self._optimizer(step)
        self.last_end_us = self.machine.compute_free_us
        if config.metric_allreduce:
            with self.machine.seen("coll", op="all_reduce", pg="0", b=4, w=4):
                metric = self.networks["world"].call(self.machine, step, 0, "metric", "allreduce", 1)
                yield from self._wait_for([metric])
        if config.item_every and step % config.item_every == 0:
            self.machine.item()
        self._end_of_step(step)

    def _load(self, step: int, micro: int) -> None:
        """The next batch, and its copy to the device."""
        rank, machine, config = self.machine.rank, self.machine, self.config
        loader = "_MultiProcessingDataLoaderIter" if config.loader_workers else "_SingleProcessDataLoaderIter"
        load_us = config.data_us * self.noise.factor("data", rank, step, micro, scale=3.0)
        added_us = self.effects.added_us("slow_data", rank, step) / config.accumulation
        name = f"enumerate(DataLoader)#{loader}.__next__"
        fields = {"l": 0, "n": config.batch_size, "w": 1}
        with machine.seen("data", **fields), machine.part("data_wait"), machine.span("user_annotation", name):
            if config.loader_workers:
                machine.work(load_us + added_us)
            else:
                self._collate(load_us + added_us)
        if config.backend != "gloo":
            self._copy_to_device(step, micro)

    def _copy_to_device(self, step: int, micro: int) -> None:
        rank, machine, config = self.machine.rank, self.machine, self.config
        size_bytes = int(config.h2d_bytes * self._work_factor(step))
        gbps = PINNED_GBPS if config.h2d_pinned else PAGEABLE_GBPS
        copy_us = size_bytes / (gbps * 1000.0) * self.noise.factor("h2d", rank, step, micro)
        copy_us += self.effects.added_us("slow_h2d", rank, step) / config.accumulation
        memory = "Pinned" if config.h2d_pinned else "Pageable"
        with machine.span("cpu_op", "aten::to"), machine.span("cpu_op", "aten::_to_copy"):
            machine.work(6.0)
            with machine.span("cpu_op", "aten::copy_") as external:
                name, args = f"Memcpy HtoD ({memory} -> Device)", f',"bytes":{size_bytes}'
                end_us = machine.enqueue(
                    "gpu_memcpy", name, "cudaMemcpyAsync", 9.0, copy_us, external, "h2d", args
                )
                if not config.h2d_pinned:
                    machine.wait_until("cudaStreamSynchronize", end_us, external)

    def _collate(self, load_us: float) -> None:
        """Read and decode samples in the training process, then stack them into a batch."""
        self.machine.work(0.8 * load_us)
        with self.machine.span("cpu_op", "aten::stack"), self.machine.span("cpu_op", "aten::cat"):
            self.machine.work(0.2 * load_us)

    def _zero_grad(self, step: int) -> None:
        with self.machine.span("user_annotation", "Optimizer.zero_grad#SGD.zero_grad"):
            self.machine.work(30.0 * self.noise.factor("zero_grad", self.machine.rank, step, scale=3.0))

    def _forward(self, step: int, micro: int) -> Waits:
        rank, config = self.machine.rank, self.config
        kernels = config.forward_kernels
        gaps = self.effects.gaps("host_gap_forward", rank, step, kernels)
        pauses = list(self.effects.acting("gc_pause", rank, step))
        pause_at = int(self.noise.uniform("gc", rank, step) * kernels)
        items = self._evenly_spaced("device_sync_item", step, kernels)
        total_us = config.forward_us + self.effects.added_us("slow_forward", rank, step) / config.accumulation
        run = self._kernels("forward", kernels, total_us, step, micro)
        with self.machine.seen("fwd", m=0, w=2), self.machine.phase("DistributedDataParallel.forward"):
            self.machine.work(40.0)
            for index, launch in enumerate(run):
                if micro == 0:
                    self._host_gaps(gaps.get(index, []))
                    if index == pause_at and pauses:
                        with self.machine.seen("gc", g=2):
                            self.machine.work(sum(plant.ms for plant in pauses) * 1000.0)
                    for _ in range(items.count(index)):
                        self.machine.item()
                launch()
                yield from self._tensor_parallel(index, kernels, step, micro)

    def _backward(self, step: int, micro: int, synchronised: bool) -> Waits:
        """The kernels of the autograd thread with the reducer's buckets between them. The main thread waits."""
        rank, config, machine = self.machine.rank, self.config, self.machine
        kernels = config.backward_kernels
        gaps = self.effects.gaps("host_gap_backward", rank, step, kernels)
        added_us = self.effects.added_us("slow_backward_kernels", rank, step) / config.accumulation
        run = self._kernels("backward", kernels, config.backward_us + added_us, step, micro)
        ready_after = self._bucket_places(kernels) if synchronised else []
        buckets: list[Collective] = []
        base_us = machine.now_us
        machine.mark_device("bwd")
        machine.work(25.0)
        machine.thread = machine.backward_thread
        for index, launch in enumerate(run):
            if micro == config.accumulation - 1:
                self._host_gaps(gaps.get(index, []))
            launch()
            yield from self._tensor_parallel(index, kernels, step, micro)
            while len(buckets) < len(ready_after) and ready_after[len(buckets)] <= index:
                buckets.append(self._reduce(len(buckets), step, micro))
        machine.work(10.0)
        machine.thread = MAIN_THREAD
        machine.mark_device("ready")
        yield from self._wait_for(buckets)
        machine.mark_device("bwd_end")
        ready_us = [bucket.issued_us[rank] for bucket in buckets]
        fields = {"m": 0, "sync": synchronised, "w": 3, "base_us": base_us, "ready_us": ready_us}
        machine.hook_events.append(HookEvent("bwd", base_us, machine.now_us, fields))

    def _bucket_places(self, kernels: int) -> list[int]:
        """Index of the backward kernel after which each bucket is ready."""
        count = len(self.config.bucket_bytes)
        if not self.config.overlap:
            return [kernels - 1] * count
        shares = self.config.bucket_position or [(bucket + 1) / count for bucket in range(count)]
        return [min(kernels - 1, max(0, round(share * kernels) - 1)) for share in shares]

    def _reduce(self, bucket: int, step: int, micro: int) -> Collective:
        elements = self.config.bucket_bytes[bucket] // 4
        call = (self.machine, step, micro, f"bucket {bucket}", "allreduce", elements)
        host = self.networks.get("host")
        return self.networks["data"].call(*call, after=host.call(*call) if host else None)

    def _tensor_parallel(self, index: int, kernels: int, step: int, micro: int) -> Waits:
        """After some kernels, the ranks of a replica sum their partial results, and the next kernel waits."""
        network, count = self.networks.get("tensor"), self.config.tensor_collectives
        if network is None:
            return
        if index in {round((call + 1) * kernels / (count + 1)) for call in range(count)}:
            elements = self.config.tensor_bytes // 4
            call = network.call(self.machine, step, micro, "activations", "allreduce", elements)
            yield from self._wait_for([call])

    def _wait_for(self, collectives: list[Collective]) -> Waits:
        """``Work.wait`` for each of the collectives."""
        for collective in collectives:
            yield collective
            end_us = collective.end_us[self.machine.rank]
            self.machine.await_collective(collective.last_arrival_us, end_us)

    def _optimizer(self, step: int) -> None:
        config = self.config
        run = self._kernels("optimizer", config.optimizer_kernels, config.optimizer_us, step, 0)
        with self.machine.seen("opt", o=0, w=5), self.machine.phase("Optimizer.step#SGD.step"):
            self.machine.work(30.0)
            for launch in run:
                launch()

    def _barriers(self, step: int) -> Waits:
        """``torch.cuda.synchronize(); dist.barrier()``: each rank's host waits for all ranks."""
        machine = self.machine
        for plant in self.effects.acting("explicit_barrier", None, step):
            for _ in range(plant.count):
                machine.synchronize()
                with machine.seen("bar", op="barrier", pg="0", w=4):
                    barrier = self.networks["world"].call(machine, step, 0, "barrier", "barrier", 1)
                    yield barrier
                    with machine.part("barrier"):
                        end_us = barrier.end_us[machine.rank]
                        machine.wait_until("cudaStreamSynchronize", end_us, machine.next_external())
                machine.compute_free_us = max(machine.compute_free_us, end_us)

    def _extra_kernels(self, kind: str, step: int) -> None:
        """Kernels outside the phases."""
        extra_us = self.effects.added_us(kind, self.machine.rank, step)
        if extra_us:
            for launch in self._kernels("extra", EXTRA_KERNELS, extra_us, step, 0):
                launch()

    def _end_of_step(self, step: int) -> None:
        rank, machine = self.machine.rank, self.machine
        self._extra_kernels("kernels_after_optimizer", step)
        machine.work(self.effects.added_us("host_work_end_of_step", rank, step))
        for plant in self.effects.acting("checkpoint", rank, step):
            self._checkpoint(plant)
        machine.work(20.0 * self.noise.factor("end", rank, step, scale=3.0))

    def _checkpoint(self, plant: Plant) -> None:
        """Copy the parameters of each bucket to the host, then write."""
        machine = self.machine
        with machine.seen("save", w=6), machine.part("checkpoint"):
            for size_bytes in self.config.bucket_bytes:
                with machine.span("cpu_op", "aten::copy_") as external:
                    copy_us, args = size_bytes / (PAGEABLE_GBPS * 1000.0), f',"bytes":{size_bytes}'
                    name = "Memcpy DtoH (Device -> Pageable)"
                    end_us = machine.enqueue(
                        "gpu_memcpy", name, "cudaMemcpyAsync", 9.0, copy_us, external, "checkpoint", args
                    )
                    machine.wait_until("cudaStreamSynchronize", end_us, external)
            machine.work(plant.ms * 1000.0)

    def _host_gaps(self, plants: list[Plant]) -> None:
        for plant in plants:
            if plant.drain:
                self.machine.item()
            self.machine.work(plant.ms * 1000.0)

    def _evenly_spaced(self, kind: str, step: int, kernels: int) -> list[int]:
        """Indices of the kernels before which the ``count`` calls of a job-wide plant are made, evenly spaced."""
        counts = [plant.count for plant in self.effects.acting(kind, None, step)]
        return [int((call + 0.5) * kernels / count) for count in counts for call in range(count)]

    def _work_factor(self, step: int) -> float:
        return self.effects.factor("uneven_work", self.machine.rank, step)

    def _kernels(self, phase: str, count: int, total_us: float, step: int, micro: int) -> Iterator[Launch]:
        """Yields the launches of a phase, one callable per kernel."""
        rank = self.machine.rank
        slower = self.effects.factor("throttled", rank, step)
        work = 1.0 if phase == "optimizer" else self._work_factor(step)
        jitter = self.noise.factors(count, phase, rank, step, micro)
        host = self.noise.factors(count, phase, "launch", rank, step, micro, scale=3.0)
        shapes = shape_args(round(self.config.batch_size * work), phase)
        shares = duration_shares(phase, count, self.config.seed)
        names = operators(phase, self.config.backend)
        for index in range(count):
            duration_us = shares[index] * total_us * work * slower * jitter[index]
            launch_us = self.config.launch_us * host[index]
            yield Launch(self.machine, names[index % len(names)], duration_us, launch_us, shapes)
