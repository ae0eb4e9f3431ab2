"""Simulates a rank's host thread and accelerator on the true clock, and records their events; or a rank without an accelerator, in which
the calling thread does all work.

The accelerator runs behind the host: a launched kernel starts when the launch has reached the device and all earlier work of its stream
is done. As on real hardware, the host blocks only on a full launch queue and on explicit waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .model import Config

COMPUTE_STREAM = 7
KERNEL_GAP_US = 0.8
MAIN_THREAD = 0
AUTOGRAD_THREAD = 1
GLOO_THREADS = (2, 3)
"""Torch runs two threads per Gloo process group."""


class HostEvent(NamedTuple):
    """An event on a host thread."""

    category: str
    name: str
    thread: int
    start_us: float
    end_us: float
    external: int
    correlation: int
    args: str
    """Further arguments as JSON members, each preceded by a comma; may be empty."""


class DeviceEvent(NamedTuple):
    """An event on a stream of the accelerator."""

    category: str
    name: str
    stream: int
    start_us: float
    end_us: float
    external: int
    correlation: int
    args: str


class HookEvent(NamedTuple):
    """An interval of the host's time as recorded by a hook in the training process, during the whole run."""

    kind: str
    start_us: float
    end_us: float
    fields: dict[str, object]


class Activity(NamedTuple):
    """An interval of true time in which the rank worked on one part of the breakdown."""

    part: str
    start_us: float
    end_us: float


class Machine:
    """Host clock, launch queue and compute stream of one rank."""

    backward_thread = AUTOGRAD_THREAD
    operator_part: str | None = None
    """Part of the breakdown to which the host's time in operators belongs; None: to no part."""

    def __init__(self, rank: int, config: Config, start_us: float) -> None:
        self.rank = rank
        self.config = config
        self.now_us = start_us
        self.compute_free_us = start_us
        self.thread = MAIN_THREAD
        self.recording_since = float("inf")
        self.host_events: list[HostEvent] = []
        self.device_events: list[DeviceEvent] = []
        self.activities: list[Activity] = []
        self.hook_events: list[HookEvent] = []
        self.device_marks: list[tuple[str, float]] = []
        """Names of the hook's CUDA events, and when the compute stream reaches them."""
        self._external = 0
        self._correlation = 100
        self._queued: deque[float] = deque(maxlen=config.queue_depth)

    @property
    def recording(self) -> bool:
        """Whether the profiler's window has begun."""
        return self.now_us >= self.recording_since

    def next_external(self) -> int:
        """A fresh "External id"."""
        self._external += 1
        return self._external

    @contextmanager
    def span(self, category: str, name: str, args: str = "") -> Iterator[int]:
        """Context of an annotation or operator. Yields its External id."""
        identity = self.next_external()
        start_us, thread, recording = self.now_us, self.thread, self.recording
        yield identity
        if recording:
            event = HostEvent(category, name, thread, start_us, self.now_us, identity, 0, args)
            self.host_events.append(event)

    @contextmanager
    def seen(self, kind: str, **fields: object) -> Iterator[None]:
        """Context whose time is recorded by a hook, in the vocabulary of step logs."""
        start_us = self.now_us
        self.mark_device(kind)
        yield
        self.mark_device(f"{kind}_end")
        self.hook_events.append(HookEvent(kind, start_us, self.now_us, fields))

    def mark_device(self, name: str) -> None:
        """Record a CUDA event."""
        if name.removesuffix("_end") in ("fwd", "bwd", "ready", "opt"):
            self.device_marks.append((name, max(self.now_us, self.compute_free_us)))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of an annotation of the main thread, which Kineto also records around its kernels on the compute stream."""
        first = len(self.device_events)
        with self.span("user_annotation", name) as external:
            yield
        own = [event for event in self.device_events[first:] if event.stream == COMPUTE_STREAM]
        if own:
            start_us, end_us = own[0].start_us, own[-1].end_us
            self.device_events.append(
                DeviceEvent("gpu_user_annotation", name, COMPUTE_STREAM, start_us, end_us, external, 0, "")
            )

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Context whose time belongs to ``part`` of the breakdown."""
        start_us = self.now_us
        yield
        self.mark(part, start_us, self.now_us)

    def mark(self, part: str, start_us: float, end_us: float) -> None:
        """Assign an interval to a part of the breakdown."""
        if self.recording and end_us > start_us:
            self.activities.append(Activity(part, start_us, end_us))

    def work(self, duration_us: float) -> None:
        """Advance the host's clock without an event."""
        self.now_us += duration_us

    def runtime(self, name: str, duration_us: float, external: int) -> int:
        """Simulate a call of the CUDA runtime by the host. Returns its correlation id."""
        self._correlation += 1
        correlation = self._correlation
        end_us = self.now_us + duration_us
        if self.recording:
            self.host_events.append(
                HostEvent("cuda_runtime", name, self.thread, self.now_us, end_us, external, correlation, "")
            )
        self.now_us = end_us
        return correlation

    def enqueue(
        self,
        category: str,
        name: str,
        call: str,
        call_us: float,
        duration_us: float,
        external: int,
        part: str = "compute",
        args: str = "",
    ) -> float:
        """Launch work on the compute stream. Returns its end. Blocks on a full launch queue."""
        full = len(self._queued) == self._queued.maxlen
        wait_us = max(0.0, self._queued[0] - self.now_us) if full else 0.0
        correlation = self.runtime(call, call_us + wait_us, external)
        start_us = max(self.now_us + self.config.launch_latency_us, self.compute_free_us + KERNEL_GAP_US)
        end_us = start_us + duration_us
        self._queued.append(start_us)
        self.compute_free_us = end_us
        if self.recording:
            self.device_events.append(
                DeviceEvent(category, name, COMPUTE_STREAM, start_us, end_us, external, correlation, args)
            )
            self.activities.append(Activity(part, start_us, end_us))
        return end_us

    def wait_until(self, name: str, until_us: float, external: int) -> None:
        """Block the host in a runtime call until the accelerator has reached ``until_us``."""
        self.runtime(name, max(0.0, until_us - self.now_us) + 2.5, external)

    def await_collective(self, last_arrival_us: float, end_us: float) -> None:
        """Make the compute stream wait for a collective. As ``Work.wait`` on a GPU, this does not block the host."""
        self.runtime("cudaStreamWaitEvent", 1.5, self.next_external())
        self.compute_free_us = max(self.compute_free_us, end_us + self.config.resume_us)

    def item(self) -> None:
        """``tensor.item()``: copy four bytes to the host, which waits for all work of the stream."""
        with self.span("cpu_op", "aten::item"), self.span("cpu_op", "aten::_local_scalar_dense") as external:
            name = "Memcpy DtoH (Device -> Pageable)"
            end_us = self.enqueue(
                "gpu_memcpy", name, "cudaMemcpyAsync", 6.0, 1.5, external, "host", ',"bytes":4'
            )
            self.wait_until("cudaStreamSynchronize", end_us, external)

    def synchronize(self) -> None:
        """``torch.cuda.synchronize()``, for the compute stream only."""
        self.wait_until("cudaDeviceSynchronize", self.compute_free_us, self.next_external())


class Processor(Machine):
    """Like :class:`Machine`, but the host does launched work immediately, and waiting blocks it."""

    backward_thread = MAIN_THREAD
    operator_part = "compute"

    def runtime(self, name: str, duration_us: float, external: int) -> int:
        """Does nothing, because there is no CUDA runtime."""
        return 0

    def enqueue(
        self,
        category: str,
        name: str,
        call: str,
        call_us: float,
        duration_us: float,
        external: int,
        part: str = "compute",
        args: str = "",
    ) -> float:
        """Do the work on the calling thread. Returns its end."""
        with self.part(part):
            self.now_us += call_us + duration_us
        self.compute_free_us = self.now_us
        return self.now_us

    def wait_until(self, name: str, until_us: float, external: int) -> None:
        """Block the thread until ``until_us``."""
        self.now_us = max(self.now_us, until_us)

    def await_collective(self, last_arrival_us: float, end_us: float) -> None:
        """``Work.wait`` on a CPU: block the thread, first for the last rank, then for the transfer."""
        start_us = self.now_us
        self.now_us = max(start_us, end_us)
        self.mark("comm_wait", start_us, min(last_arrival_us, self.now_us))
        self.mark("comm_transfer", max(start_us, last_arrival_us), self.now_us)

    def item(self) -> None:
        """``tensor.item()``: a read of memory."""
        with self.span("cpu_op", "aten::item"), self.span("cpu_op", "aten::_local_scalar_dense"):
            self.work(3.0)

    def synchronize(self) -> None:
        """Does nothing, because there is no accelerator."""
