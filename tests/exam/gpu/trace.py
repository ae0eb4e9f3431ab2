"""Writes the trace that a profiler would record of a simulated rank, in Kineto's format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from .simulate import BACKWARD, Event, Rank, Setup

BASE_NS = 1_700_000_000_000_000_000
PID = 51000
THREADS = {0: 0, BACKWARD: 640}
CBID = {
    "cudaLaunchKernel": 211,
    "cudaLaunchKernelExC": 430,
    "cudaMemcpyAsync": 41,
    "cudaStreamSynchronize": 131,
}
ON_DEVICE = ("kernel", "gpu_memcpy")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")


def write(setup: Setup, ranks: list[Rank], folder: Path) -> None:
    """Write one file per rank, with the events that its window and profiler settings keep."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        (folder / f"rank{rank.rank}.json").write_text(json.dumps(document(setup, rank)))


def document(setup: Setup, rank: Rank) -> dict[str, Any]:
    """The content of the rank's trace file."""
    recorded, me = setup.recorded, rank.rank
    first, last = recorded.first_step[me], recorded.last_step[me]
    cut = recorded.cut[me]
    opened = rank.step_start[first] + cut * (rank.step_start[first + 1] - rank.step_start[first])
    closed = rank.step_end[last] + 20.0
    host_closed = rank.step_start[last + 1] if last + 1 < setup.steps else closed
    chance = random.Random(f"lost {setup.seed} {me}")
    events = []
    for number, event in enumerate(sorted(rank.events, key=lambda each: (each.start, -each.end))):
        limit = closed if event.category in ON_DEVICE else min(closed, host_closed)
        if not (opened <= event.start and event.end <= limit + 1.0) or not _is_kept(setup, event):
            continue
        if chance.random() >= recorded.lost_share:
            events += _event_lines(setup, rank, event, number)
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": setup.world, "ranks": list(range(setup.world))}
    ]
    if setup.hierarchical:
        members = setup.on_host(setup.host_of[me])
        groups.append(
            {
                "pg_name": str(setup.host_of[me] + 1),
                "pg_desc": "intra_host",
                "pg_size": len(members),
                "ranks": list(members),
            }
        )
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0}
        ],
        "distributedInfo": {
            "backend": "nccl",
            "rank": me,
            "world_size": setup.world,
            "pg_count": len(groups),
            "pg_config": groups,
            "nccl_version": "2.21.5",
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": _metadata_events(rank) + events,
    }


def _is_kept(setup: Setup, event: Event) -> bool:
    recorded = setup.recorded
    if event.name.startswith("ProfilerStep"):
        return recorded.step_annotations
    return {
        "kernel": True,
        "gpu_memcpy": True,
        "cuda_runtime": recorded.runtime,
        "cpu_op": recorded.operators,
        "user_annotation": recorded.operators,
        "python_function": recorded.stacks,
    }[event.category]


def _event_lines(setup: Setup, rank: Rank, event: Event, number: int) -> list[dict[str, Any]]:
    device = _local(setup, rank.rank)
    on_device = event.category in ON_DEVICE
    ts, end = _local_us(setup, rank.rank, event.start), _local_us(setup, rank.rank, event.end)
    where = (
        {"pid": device, "tid": event.thread}
        if on_device
        else {"pid": PID, "tid": PID + THREADS[event.thread]}
    )
    args: dict[str, Any] = {"External id": number + 1}
    if on_device:
        args |= {"device": device, "context": 1, "stream": event.thread, "correlation": event.correlation}
    elif event.correlation:
        args |= {"cbid": CBID.get(event.name, 137), "correlation": event.correlation}
    else:
        args["Ev Idx"] = number
    line = {
        "ph": "X",
        "cat": event.category,
        "name": event.name,
        **where,
        "ts": ts,
        "dur": round(end - ts, 3),
    }
    line["args"] = args
    out = [line]
    if event.name.startswith("nccl"):
        _add_metadata(setup, event, args)
    else:
        args |= {key: value for key, value in event.more.items() if setup.recorded.shapes or key == "bytes"}
    flow = {"id": event.correlation, "cat": "ac2g", "name": "ac2g", **where, "ts": ts}
    if setup.recorded.runtime and event.name in LAUNCHES:
        out.append({"ph": "s", **flow})
    if setup.recorded.runtime and on_device:
        out.append({"ph": "f", "bp": "e", **flow})
    return out


def _add_metadata(setup: Setup, event: Event, args: dict[str, Any]) -> None:
    """Add NCCL's metadata of the kernel to ``args``, if the simulated profiler records it."""
    more, recorded = event.more, setup.recorded
    metadata = {
        "Collective name": "allreduce",
        "In msg nelems": more["elements"],
        "Out msg nelems": more["elements"],
        "Group size": len(more["members"]),
        "dtype": "Float",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": str(more["group"]),
        "Process Group Description": "default_pg" if more["group"] == 0 else "intra_host",
        "Process Group Ranks": str(list(more["members"])),
    }
    if recorded.sequence_numbers:
        metadata["Seq"] = more["sequence"]
    if recorded.nccl_metadata:
        args.update(metadata)


def number_collectives(ranks: list[Rank]) -> None:
    """Set the sequence number in the group for each rank's collectives."""
    for rank in ranks:
        counts: dict[int, int] = {}
        for event in rank.events:
            if "group" in event.more:
                counts[event.more["group"]] = counts.get(event.more["group"], 0) + 1
                event.more["sequence"] = counts[event.more["group"]]


def _local(setup: Setup, rank: int) -> int:
    return setup.on_host(setup.host_of[rank]).index(rank)


def _local_us(setup: Setup, rank: int, true_us: float) -> float:
    """A true time, µs, on the clock of the rank's host."""
    host = setup.host_of[rank]
    return round(setup.offset_us[host] + true_us * (1 + setup.drift_ppm[host] * 1e-6), 3)


def _metadata_events(rank: Rank) -> list[dict[str, Any]]:
    def name(what: str, pid: int, tid: int, key: str, value: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {key: value}}

    main = f"thread {PID} (pt_main_thread)"
    autograd = f"thread {PID + THREADS[BACKWARD]} (pt_autograd_0)"
    return [
        name("process_name", PID, 0, "name", "python3"),
        name("process_labels", PID, 0, "labels", "CPU"),
        name("thread_name", PID, PID, "name", main),
        name("thread_name", PID, PID + THREADS[BACKWARD], "name", autograd),
    ]
