"""Facts from profiler windows: overlap of communication, buckets, and what the devices did."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.facts import BucketFacts, CommunicationFacts, GpuFacts
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.numerics import EMPTY, Intervals, clip, covered, intersect, subtract, total, union
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import (
    UNKNOWN_STEP,
    Window,
    launched_inside,
    launches,
    rows_of,
    step_of_collectives,
)
from ddpdoctor.trace import classify

from .bandwidth import bandwidth_points, large_bus_gb_per_s, latency_and_rate, transfers

_FEWEST_MESSAGES = 3
_COMM = (SyncKind.GRADIENTS, SyncKind.COLLECTIVE, SyncKind.BROADCAST, SyncKind.MODEL)
_MATMUL = (
    "gemm",
    "gemv",
    "conv",
    "cutlass",
    "cudnn",
    "implicit",
    "wgrad",
    "dgrad",
    "xmma",
    "nvjet",
    "fmha",
    "flash",
    "Cijk_",
)
_TENSOR = (
    "tensorop",
    "xmma",
    "hmma",
    "884",
    "1688",
    "16816",
    "s161616",
    "wgmma",
    "nvjet",
    "fmha",
    "flash",
    "_bf16",
    "_f16",
    "tf32",
    "mma",
    "h884",
    "i8816",
    "bf16",
)


def communication_facts(graph: Graph, windows: Sequence[Window]) -> CommunicationFacts:
    """Waiting and transfer of the measured cycles, and how much of the transfer ran beside computation."""
    steps = _steps(graph, windows)
    hidden = [_hidden_share(window) for window in windows if len(window.comms)]
    known = [h for h in hidden if h is not None]
    exposed = [_exposed_ns(window) / max(len(window.steps), 1) for window in windows if len(window.comms)]
    points = bandwidth_points(graph)
    median_bus, best_bus = large_bus_gb_per_s(points)
    facts = CommunicationFacts(
        exposed_ms=float(np.median(exposed)) / 1e6 if exposed else None,
        hidden_share=float(np.median(known)) if known else None,
        bytes_per_step=_bytes_per_step(windows, steps),
        sharded_share=_sharded_share(windows),
        collectives_per_step=float(np.median([_in_steps(w).sum() for w in windows])) / steps
        if windows
        else None,
        bus_gb_per_s=median_bus,
        best_bus_gb_per_s=best_bus,
        matched=graph.matched,
        unmatched=graph.unmatched,
        refused=graph.refused,
        clock_error_us=graph.clock_error_ns / 1e3 if graph.clock_error_ns is not None else None,
    )
    if not graph.matched or not graph.groups:
        return facts
    wait, transfer = wait_and_transfer_ms(graph)
    return msgspec.structs.replace(facts, wait_ms=wait, transfer_ms=transfer, total_transfer_ms=transfer)


def wait_and_transfer_ms(graph: Graph) -> tuple[float, float]:
    """Mean over ranks and cycles of waiting and of transfer in collectives (barriers apart), ms per step."""
    wait, transfer, cycles = 0.0, 0.0, 0
    for group in graph.groups:
        cycles += len(group.steps)
        chosen = [k for k, sync in enumerate(group.syncs) if sync.kind in _COMM]
        if not chosen:
            continue
        world = len(graph.ranks)
        end = np.maximum(group.end[:, chosen], group.arrival[:, chosen])
        together = np.clip(group.last_arrival[:, chosen, None], group.arrival[:, chosen], end)
        wait += float(np.nansum(together - group.arrival[:, chosen])) / world
        transfer += float(np.nansum(end - together)) / world
    return wait / max(cycles, 1) / 1e6, transfer / max(cycles, 1) / 1e6


def _steps(graph: Graph, windows: Sequence[Window]) -> float:
    marked = [len(w.steps) for w in windows if w.steps]
    return float(np.median(marked)) if marked else 1.0


def _comm_union(window: Window) -> Intervals:
    return union(window.comms.start, window.comms.end)


def _hidden_share(window: Window) -> float | None:
    """|communication and computation| / |communication|: HolisticTraceAnalysis's overlap, for one rank."""
    comm = _comm_union(window)
    whole = total(comm)
    return total(intersect(comm, window.compute)) / whole if whole else None


def _exposed_ns(window: Window) -> float:
    """ns of exposed communication inside the marked steps."""
    exposed = subtract(_comm_union(window), window.compute)
    return total(clip(exposed, window.steps[0][1], window.steps[-1][2]) if window.steps else exposed)


def _bytes_per_step(windows: Sequence[Window], steps: float) -> float | None:
    sums = [
        float(np.nansum(w.comms.bytes[_in_steps(w)]))
        for w in windows
        if len(w.comms) and not np.isnan(w.comms.bytes).all()
    ]
    return float(np.median(sums)) / steps if sums else None


_SHARDED = ("allgather", "reducescatter")


def _sharded_share(windows: Sequence[Window]) -> float | None:
    """Of the time in collectives with which gradients, or the parameters that they belong to, travel."""
    spent = [
        (float(length), operation in _SHARDED)
        for w in windows
        for length, operation, kind in zip(
            w.comms.end - w.comms.start, w.comms.operation, w.comms.kind, strict=True
        )
        if kind in (SyncKind.GRADIENTS, SyncKind.MODEL)
    ]
    whole = sum(length for length, _ in spent)
    return sum(length for length, sharded in spent if sharded) / whole if whole else None


def _in_steps(window: Window) -> NDArray[np.bool_]:
    """[M] the collectives that the host launched in the marked steps; all of them where none is marked."""
    inside: NDArray[np.bool_] = step_of_collectives(window) != UNKNOWN_STEP
    return inside


def bucket_facts(graph: Graph, windows: Sequence[Window], known: BucketFacts) -> BucketFacts:
    """Adds to ``known`` (from settings and step logs) what the window shows of the gradients' reductions."""
    steps = _steps(graph, windows)
    chosen = [
        _in_steps(w) & np.array([kind == SyncKind.GRADIENTS for kind in w.comms.kind], bool) for w in windows
    ]
    counts = [float(of.sum()) / steps for of in chosen]
    sizes = [b for w, of in zip(windows, chosen, strict=True) for b in w.comms.bytes[of] if b > 0]
    syncs = known.syncs_per_step or _syncs(graph)
    numbers = [found for window in windows if (found := backward_of(window)) is not None]
    return msgspec.structs.replace(
        known,
        per_sync=known.per_sync or (float(np.median(counts)) / syncs if any(counts) else None),
        median_bytes=known.median_bytes or (float(np.median(sizes)) if sizes else None),
        total_bytes=known.total_bytes
        or (float(np.sum(sizes)) / steps / len(windows) / syncs if sizes else None),
        syncs_per_step=syncs if any(counts) else None,
        backward_ms=known.backward_ms or _median(numbers, 0),
        first_ready_share=known.first_ready_share
        if known.first_ready_share is not None
        else _median(numbers, 1),
        barriers_per_step=_per_step(windows, steps, "barrier", known.barriers_per_step),
        collectives_per_step=_per_step(windows, steps, "collective", known.collectives_per_step),
    )


def _syncs(graph: Graph) -> float:
    """Backward passes whose gradients were reduced, for each step of an optimizer."""
    counts = [
        len({s.micro for s in group.syncs if s.kind == SyncKind.GRADIENTS})
        / max(1, len({s.update for s in group.syncs if s.kind == SyncKind.GRADIENTS}))
        for group in graph.groups
    ]
    return float(max(counts, default=0.0)) or 1.0


def _median(rows: list[tuple[float, float]], column: int) -> float | None:
    return float(np.median([row[column] for row in rows])) if rows else None


def backward_of(window: Window) -> tuple[float, float] | None:
    """(length of a backward pass in ms, when its first bucket starts as a share of it), medians over the
    steps.

    The backward pass is what the autograd engine's thread launches; on a CPU, what it computes.
    """
    trace = window.trace
    engine = trace.category_mask("cpu_op") & np.isin(
        trace.name, trace.name_ids(lambda n: n.startswith("autograd::engine::evaluate_function"))
    )
    if not engine.any() or not window.steps:
        return None
    if window.on_device:
        # The device runs behind the host, by more than a step at times: its kernels belong to the step that launched them.
        rows = np.flatnonzero(launched_inside(trace, engine) & ~classify.communication_kernels(trace))
        calls = launches(trace, rows)
        rows, calls = rows[calls >= 0], calls[calls >= 0]
    else:
        rows = calls = np.flatnonzero(engine)
    start, end = trace.start_ns[rows] + window.shifted_ns, trace.end_ns[rows] + window.shifted_ns
    host = trace.start_ns[calls] + window.shifted_ns
    reduced = np.array([k == SyncKind.GRADIENTS for k in window.comms.kind], bool)
    lengths, shares = [], []
    for _, low, high in window.steps:
        own = (host >= low) & (host < high)
        issued = reduced & (window.comms.issued >= low) & (window.comms.issued < high)
        if not own.any() or not issued.any():
            continue
        begin, stop = float(start[own].min()), float(end[own].max())
        lengths.append((stop - begin) / 1e6)
        shares.append((float(window.comms.start[issued].min()) - begin) / max(stop - begin, 1.0))
    return (float(np.median(lengths)), float(np.clip(np.median(shares), 0, 1))) if lengths else None


def _per_step(windows: Sequence[Window], steps: float, kind: str, known: float | None) -> float | None:
    if known is not None or not windows:
        return known
    return float(np.median([sum(k == kind for k in w.comms.kind) for w in windows])) / steps


def message_cost(graph: Graph) -> tuple[float | None, float | None]:
    """(latency us per message, bytes per ns) of the gradients' reductions in the window."""
    rows = [row for row in transfers(graph) if row[0] == "allreduce"]
    if len(rows) < _FEWEST_MESSAGES:
        return None, None
    latency, rate = latency_and_rate(np.array([row[1] for row in rows]), np.array([row[2] for row in rows]))
    return latency / 1e3, rate


def gpu_facts(windows: Sequence[Window]) -> GpuFacts:
    """What the devices did; all None without devices."""
    on_device = [w for w in windows if w.on_device]
    if not on_device:
        return GpuFacts()
    per_window = [_device_numbers(window) for window in on_device]

    def median(name: str) -> float | None:
        values = [value for numbers in per_window if (value := numbers.get(name)) is not None]
        return float(np.median(values)) if values else None

    capability = [
        float(f"{d['computeMajor']}.{d.get('computeMinor', 0)}")
        for w in on_device
        for d in w.trace.meta.devices
        if d.get("computeMajor") is not None
    ]
    return GpuFacts(
        busy_share=median("busy_share"),
        idle_share=median("idle_share"),
        kernels_per_step=median("kernels_per_step"),
        optimizer_kernels_share=median("optimizer_kernels_share"),
        median_kernel_us=median("median_kernel_us"),
        tensor_core_share=median("tensor_core_share"),
        matmul_share=median("matmul_share"),
        pageable_copy_ms=median("pageable_copy_ms"),
        copy_bytes_per_step=median("copy_bytes_per_step"),
        compute_capability=min(capability) if capability else None,
    )


def _device_numbers(window: Window) -> dict[str, float | None]:
    trace = window.trace
    steps = max(len(window.steps), 1)
    span = max(window.span[1] - window.span[0], 1)
    kernels = trace.category_mask("kernel")
    comm = trace.name_mask(classify.is_communication_kernel)
    compute = kernels & ~comm
    times = trace.duration_ns[compute]
    matmul = compute & trace.name_mask(lambda n: any(part in n for part in _MATMUL))
    tensor = matmul & np.isin(
        trace.name, trace.name_ids(lambda n: any(part in n.lower() for part in _TENSOR))
    )
    stepping = classify.optimizer_steps(trace)
    copies = trace.category_mask("gpu_memcpy")
    to_device = copies & trace.name_mask(lambda n: "HtoD" in n or "Host to Device" in n)
    pageable = to_device & trace.name_mask(lambda n: "pageable" in n.lower())
    comm_time = _comm_union(window) if len(window.comms) else EMPTY
    busy = union(
        np.concatenate((window.compute[0], comm_time[0])), np.concatenate((window.compute[1], comm_time[1]))
    )
    compute_ns, matmul_ns = float(times.sum()), float(trace.duration_ns[matmul].sum())
    moved = trace.bytes[to_device]
    return {
        "busy_share": total(window.compute) / span,
        "idle_share": 1.0 - min(1.0, float(covered(busy, window.span[0], window.span[1])) / span),
        "kernels_per_step": float(compute.sum()) / steps,
        "optimizer_kernels_share": float((compute & launched_inside(trace, stepping)).sum())
        / max(float(compute.sum()), 1.0)
        if stepping.any()
        else None,
        "median_kernel_us": float(np.median(times)) / 1e3 if len(times) else None,
        "matmul_share": matmul_ns / compute_ns if compute_ns else None,
        "tensor_core_share": float(trace.duration_ns[tensor].sum()) / matmul_ns if matmul_ns else None,
        "pageable_copy_ms": total(rows_of(trace, pageable)) / steps / 1e6 if to_device.any() else None,
        "copy_bytes_per_step": float(moved[moved > 0].sum()) / steps if to_device.any() else None,
    }
