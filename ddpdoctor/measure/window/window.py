"""One rank's profiler window reduced to what the graph needs: steps, collectives, and what the device and the
host did when.

Times are int64 ns on the trace's own clock until :meth:`Window.shift` puts them on the common one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, complement, intersect, subtract, union
from ddpdoctor.trace import RankTrace, classify

from .amounts import amounts
from .collectives import Comms, find_comms
from .gaps import after_sync, device_gaps
from .hostwaits import NO_WAITS, DeviceTimeline, Waits, waits_and_idle
from .pauses import collecting, saving

Ints = NDArray[np.int64]

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver", "cpu_op", "mtia_ccp_events", "xpu_runtime", "python_function")


@dataclass
class Window:
    """What one rank's window holds."""

    trace: RankTrace
    rank: int
    host: str
    on_device: bool
    """Whether there are device events; else the training thread's own operators are the computation."""
    steps: list[tuple[int, int, int]]
    """(number, start, end) on the host, in order; [] where the trace marks none."""
    span: tuple[int, int]
    """First start and last end of anything that runs."""
    comms: Comms
    sets: dict[str, Intervals] = field(default_factory=dict)
    """Disjoint interval sets per component of work."""
    compute: Intervals = EMPTY
    """All computation, for overlap."""
    stalled: Intervals = EMPTY
    """Beside a collective: no computation, because the host was late to launch it. A rank that waits in a collective
    loses there what others lose before it."""
    waits: Waits = NO_WAITS
    """Where the host waited for its device."""
    idle_after: dict[str, Intervals] = field(default_factory=dict)
    """The device's idle time that follows from them, by their kind."""

    forwards: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Starts of DDP's forward calls on the host: one per micro-batch."""
    updates: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Starts of the steps of optimizers on the host."""
    elements: dict[int, float] = field(default_factory=dict)
    """Step → how much there was to compute, where the trace records shapes, see :mod:`.amounts`."""
    shifted_ns: int = 0
    """ns by which the window was moved from the trace's own clock."""

    def shift(self, offset_ns: int) -> None:
        """Move everything by ``offset_ns``."""
        self.shifted_ns += offset_ns
        self.steps = [(n, a + offset_ns, b + offset_ns) for n, a, b in self.steps]
        self.span = (self.span[0] + offset_ns, self.span[1] + offset_ns)
        self.comms.shift(offset_ns)
        self.sets = {name: (a + offset_ns, b + offset_ns) for name, (a, b) in self.sets.items()}
        self.compute = (self.compute[0] + offset_ns, self.compute[1] + offset_ns)
        self.stalled = (self.stalled[0] + offset_ns, self.stalled[1] + offset_ns)
        self.idle_after = {kind: (a + offset_ns, b + offset_ns) for kind, (a, b) in self.idle_after.items()}
        self.forwards = self.forwards + offset_ns
        self.updates = self.updates + offset_ns

    def micro_batch(self, at: int) -> int:
        """Number, within its step, of the micro-batch to which a host time belongs; 0 where the trace shows
        no forward calls."""
        return max(0, self._since_step(self.forwards, at) - 1)

    def update(self, at: int) -> int:
        """How many steps of optimizers began before a host time in its step."""
        return self._since_step(self.updates, at)

    def _since_step(self, moments: Ints, at: int) -> int:
        starts = [start for _, start, _ in self.steps]
        index = int(np.searchsorted(starts, at, side="right")) - 1
        since = starts[index] if index >= 0 else self.span[0]
        return int(((moments >= since) & (moments <= at)).sum())


def read_window(trace: RankTrace, bounds: list[tuple[int, int, int]] | None = None) -> Window:
    """Reduce a trace. ``bounds`` are the steps where something better than the trace's own marks knows
    them."""
    device = trace.category_mask(*DEVICE)
    on_device = bool(trace.category_mask("kernel").any())
    main = main_lane(trace)
    comms = find_comms(trace, main)
    steps = bounds or _steps(trace, main)
    relevant = device if on_device else trace.category_mask("cpu_op", "user_annotation")
    if not relevant.any():
        relevant = np.ones(trace.size, bool)
    start = int(trace.start_ns[relevant].min()) if trace.size else 0
    end = int(trace.end_ns[relevant].max()) if trace.size else 0
    window = Window(trace, trace.meta.rank or 0, trace.meta.host or "", on_device, steps, (start, end), comms)
    forward = trace.name_mask(classify.is_ddp_forward) & trace.category_mask("user_annotation", "cpu_op")
    window.forwards = np.sort(trace.start_ns[forward])
    stepping = classify.optimizer_steps(trace)
    window.updates = np.sort(trace.start_ns[stepping])
    window.elements = amounts(trace, steps)
    if on_device:
        _device_sets(window, main)
    else:
        _host_sets(window, main)
    return window


_QUEUED_NS = 20_000
"""A collective that starts this soon after the one before it was waiting for it."""


def arrivals(window: Window) -> tuple[Ints, NDArray[np.bool_]]:
    """[M] when each collective can start, ns, and whether it was queued until then: behind another it can start when
    that one is over. All streams count as one queue, so that a rank is in one collective at a time."""
    comms = window.comms
    order = np.argsort(comms.start, kind="stable")
    over = np.maximum.accumulate(comms.end[order])[:-1]
    arrival, queued = comms.start.copy(), np.zeros(len(comms), bool)
    queued[order[1:]] = comms.start[order[1:]] - over < _QUEUED_NS
    arrival[order[1:]] = np.maximum(arrival[order[1:]], over)
    return np.minimum(arrival, comms.end), queued


def main_lane(trace: RankTrace) -> int:
    """The training thread: the lane with the step marks, else with the optimizer's steps, else with most host
    events."""
    for predicate in (lambda n: classify.step_number(n) is not None, classify.is_optimizer_step):
        rows = trace.name_mask(predicate) & trace.category_mask("user_annotation", "cpu_op")
        if rows.any():
            return int(np.bincount(trace.lane[rows]).argmax())
    rows = trace.category_mask("cpu_op", "user_annotation", "python_function")
    return int(np.bincount(trace.lane[rows]).argmax()) if rows.any() else -1


def _steps(trace: RankTrace, main: int) -> list[tuple[int, int, int]]:
    rows = np.flatnonzero(
        trace.name_mask(lambda n: classify.step_number(n) is not None)
        & trace.category_mask("user_annotation", "cpu_op")
        & (trace.lane == main)
    )
    if len(rows):
        return sorted(
            {
                (
                    int(classify.step_number(trace.name_of(int(r))) or 0),
                    int(trace.start_ns[r]),
                    int(trace.end_ns[r]),
                )
                for r in rows
            },
            key=lambda step: step[1],
        )
    rows = np.flatnonzero(trace.name_mask(classify.is_optimizer_step) & (trace.lane == main))
    ends = sorted(_outermost_ends(trace, rows))
    return [(i, a, b) for i, (a, b) in enumerate(pairwise(ends))]


def _outermost_ends(trace: RankTrace, rows: NDArray[np.int64]) -> set[int]:
    ends: set[int] = set()
    reach = -1
    for row in rows[np.argsort(trace.start_ns[rows], kind="stable")]:
        if trace.start_ns[row] >= reach:
            reach = int(trace.end_ns[row])
            ends.add(reach)
    return ends


def rows_of(trace: RankTrace, mask: NDArray[np.bool_]) -> Intervals:
    """Union of the events in ``mask``."""
    return union(trace.start_ns[mask], trace.end_ns[mask])


def _device_sets(window: Window, main: int) -> None:
    """Components of a rank with a device: kernels, copies, and why the device stood idle."""
    trace = window.trace
    # A copy within the device, as of a bucket into its gradients, is work like any other.
    moving = trace.category_mask("gpu_memcpy")
    inside = moving & trace.name_mask(lambda n: classify.memcpy_kind(n) == "DtoD")
    kernels = trace.category_mask("kernel", "gpu_memset") | inside
    comm = np.zeros(trace.size, bool)
    comm[trace.name_mask(classify.is_communication_kernel)] = True
    compute = rows_of(trace, kernels & ~comm)
    stepping = classify.optimizer_steps(trace)
    optimizer = rows_of(trace, kernels & ~comm & launched_inside(trace, stepping))
    copying = rows_of(trace, moving & ~inside)
    in_use = union(*_joined(compute, (window.comms.start, window.comms.end)))
    saved = saving(trace, kernels & ~comm, main, in_use)
    copies = subtract(subtract(copying, compute), saved)
    window.compute = compute
    busy = union(
        np.concatenate((compute[0], copies[0], window.comms.start)),
        np.concatenate((compute[1], copies[1], window.comms.end)),
    )
    for_host, by_device, queued = device_gaps(trace, (kernels | moving) & ~comm, window.comms.end)
    computing = union(*_joined(compute, subtract(subtract(by_device, saved), copies)))
    window.stalled = intersect(for_host, union(window.comms.start, window.comms.end))
    idle = subtract(subtract(complement(busy, *window.span), saved), computing)
    collected = intersect(idle, collecting(trace, main))
    idle = subtract(idle, collected)
    data = intersect(idle, _data(trace))
    waiting = intersect(subtract(idle, data), after_sync(trace, idle))
    issuing = intersect(
        subtract(subtract(idle, data), waiting),
        rows_of(trace, trace.category_mask("cuda_runtime", "cuda_driver", "cpu_op")),
    )
    late = subtract(subtract(idle, data), queued)
    timeline = DeviceTimeline(
        subtract(busy, saved), union(*_joined(late, _last_idle(window))), kernels & ~comm
    )
    window.waits, window.idle_after = waits_and_idle(trace, window.comms, timeline)
    window.sets = {
        "data": data,
        "device_sync": waiting,
        "launch": issuing,
        "copy": copies,
        "collection": collected,
        "checkpoint": saved,
        "optimizer": optimizer,
        "forward": subtract(computing, optimizer),
    }


def _last_idle(window: Window) -> Intervals:
    """From the device's last event to the end of the last step on the host: what it works there comes before the next
    launch."""
    return union([window.span[1]], [window.steps[-1][2]]) if window.steps else EMPTY


def launched_inside(trace: RankTrace, marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which device events were launched while one of the marked host events was open."""
    inside = np.zeros(trace.size, bool)
    opened = rows_of(trace, marks)
    if not len(opened[0]):
        return inside
    calls = trace.category_mask("cuda_runtime", "cuda_driver") & (trace.correlation >= 0)
    index = np.searchsorted(opened[0], trace.start_ns[calls], side="right") - 1
    within = (index >= 0) & (trace.start_ns[calls] < opened[1][np.clip(index, 0, None)])
    launched = trace.correlation[calls][within]
    return trace.category_mask(*DEVICE) & np.isin(trace.correlation, launched)


def _data(trace: RankTrace) -> Intervals:
    return rows_of(trace, classify.next_batches(trace))


def _host_sets(window: Window, main: int) -> None:
    """Components of a rank without a device: the training thread's own operators."""
    trace = window.trace
    on_main = trace.lane == main
    ops = trace.category_mask("cpu_op", "user_annotation")

    def named(predicate: Callable[[str], bool]) -> Intervals:
        return rows_of(trace, on_main & ops & trace.name_mask(predicate))

    data = named(classify.is_dataloader)
    optimizer = subtract(named(classify.is_optimizer_step), data)
    backward = subtract(named(lambda n: n.startswith("autograd::engine::evaluate_function")), optimizer)
    plain = on_main & trace.category_mask("cpu_op") & ~trace.name_mask(_is_issue)
    taken = union(
        np.concatenate((data[0], optimizer[0], backward[0])),
        np.concatenate((data[1], optimizer[1], backward[1])),
    )
    forward = subtract(union(*_joined(rows_of(trace, plain), named(classify.is_ddp_forward))), taken)
    window.sets = {"data": data, "optimizer": optimizer, "backward": backward, "forward": forward}
    window.compute = union(
        np.concatenate((optimizer[0], backward[0], forward[0])),
        np.concatenate((optimizer[1], backward[1], forward[1])),
    )


def _is_issue(name: str) -> bool:
    return name.startswith("c10d::")


def _joined(a: Intervals, b: Intervals) -> Intervals:
    return np.concatenate((a[0], b[0])), np.concatenate((a[1], b[1]))
