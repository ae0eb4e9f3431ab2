"""Jobs that stop, simulated: hosts issue operations, devices run those that all members have at the head of a stream, and each
rank's flight recorder is dumped when nothing moves any more."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Op:
    """One operation in a rank's program."""

    group: str
    name: str
    sizes: tuple[int, ...] = (1024,)
    dtype: str = "Float"
    sync: bool = False
    """The host reads the result before it goes on."""
    stream: int = 0
    peer: int | None = None
    """Of a send or recv."""
    line: int = 10


@dataclass
class Job:
    """Groups and what each rank's program issues, and the faults."""

    groups: dict[str, tuple[str, tuple[int, ...]]]
    """name → description, members"""
    programs: dict[int, list[Op]]
    host_stops: dict[int, int] = field(default_factory=dict)
    """Rank → place in its program that its host does not reach."""
    blind: dict[int, int] = field(default_factory=dict)
    """Rank → place from which on nothing notes that its operations are finished."""
    device_stops: dict[int, int] = field(default_factory=dict)
    """Rank → place that its device never finishes."""
    killed: tuple[int, ...] = ()
    """They stop like ``host_stops``, and leave no dump."""


@dataclass
class _Rank:
    issued: int = 0
    done: set[int] = field(default_factory=set)


def run(job: Job) -> dict[int, _Rank]:
    """Let the job go until nothing moves."""
    ranks = {rank: _Rank() for rank in job.programs}
    moved = True
    while moved:
        moved = sum(_issue(job, rank, ranks[rank]) for rank in ranks) > 0
        heads = {rank: _heads(job, rank, ranks[rank]) for rank in ranks}
        waiting: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for rank, places in heads.items():
            for place in places:
                if place != job.device_stops.get(rank):
                    waiting[_meeting(job, rank, place)].append((rank, place))
        for meeting, found in waiting.items():
            if len(found) == (2 if meeting[0] == "message" else len(job.groups[meeting[1]][1])):
                moved = True
                for rank, place in found:
                    ranks[rank].done.add(place)
    return ranks


def _issue(job: Job, rank: int, state: _Rank) -> bool:
    program, before = job.programs[rank], state.issued
    while state.issued < min(len(program), job.host_stops.get(rank, len(program))):
        if state.issued and program[state.issued - 1].sync and len(state.done) < state.issued:
            break
        state.issued += 1
    return state.issued > before


def _heads(job: Job, rank: int, state: _Rank) -> list[int]:
    heads: dict[int, int] = {}
    for place in range(state.issued):
        if place not in state.done:
            heads.setdefault(job.programs[rank][place].stream, place)
    return list(heads.values())


def _meeting(job: Job, rank: int, place: int) -> Any:
    """What must be at the head on all that take part."""
    program = job.programs[rank]
    op = program[place]
    alike = [each for each in program[:place] if each.group == op.group]
    if op.peer is None:
        return ("collective", op.group, sum(each.peer is None for each in alike))
    sender, receiver = (rank, op.peer) if op.name == "send" else (op.peer, rank)
    nth = sum(each.name == op.name and each.peer == op.peer for each in alike)
    return ("message", op.group, sender, receiver, nth)


def documents(
    job: Job,
    *,
    only_active: bool = True,
    kept: int = 2000,
    without: tuple[str, ...] = (),
    frames: bool = False,
) -> dict[int, dict[str, Any]]:
    """The dump of each rank that leaves one, without the keys named in ``without``."""
    ranks = run(job)
    found = {}
    for rank, state in ranks.items():
        if rank in job.killed:
            continue
        entries = _entries(job, rank, state, frames)[-kept:]
        if only_active:
            entries = [entry for entry in entries if not entry["retired"]]
        own = [name for name, (_, members) in job.groups.items() if rank in members]
        numbers = {name: number for number, name in enumerate(own)}
        config = {
            name: {"name": name, "desc": job.groups[name][0], "ranks": str(list(job.groups[name][1]))}
            for name in own
        }
        document = {
            "version": "2.9",
            "pg_config": config,
            "nccl_version": "2.27.3",
            "pg_status": {
                str(numbers[name]): {
                    "last_enqueued_collective": sum(
                        op.group == name for op in job.programs[rank][: state.issued]
                    ),
                    "last_started_collective": -1,
                    "last_completed_collective": 0,
                }
                for name in own
            },
            "entries": [entry | {"pg_id": numbers[entry["process_group"][0]]} for entry in entries],
        }
        found[rank] = {
            key: [{k: v for k, v in e.items() if k not in without} for e in value]
            if key == "entries"
            else value
            for key, value in document.items()
            if key not in without
        }
    return found


def _entries(job: Job, rank: int, state: _Rank, frames: bool) -> list[dict[str, Any]]:
    counts: dict[str, int] = defaultdict(int)
    messages: dict[str, int] = defaultdict(int)
    entries = []
    for place, op in enumerate(job.programs[rank][: state.issued]):
        members = job.groups[op.group][1]
        counts[op.group] += op.peer is None
        messages[op.group] += op.peer is not None
        name = op.name
        if op.peer is not None:
            arrow = "->" if op.name == "send" else "<-"
            name = f"{op.name} {members.index(rank)}{arrow}{members.index(op.peer)}"
        finished = place in state.done and place < job.blind.get(rank, len(job.programs[rank]))
        entries.append(
            {
                "record_id": place,
                "process_group": (op.group, job.groups[op.group][0]),
                "collective_seq_id": counts[op.group],
                "p2p_seq_id": messages[op.group],
                "op_id": counts[op.group] + messages[op.group],
                "profiling_name": f"nccl:{name}",
                "time_created_ns": 1_758_580_000_000_000_000 + place * 1_000_000 + rank,
                "input_sizes": [list(op.sizes)],
                "input_dtypes": [op.dtype],
                "output_sizes": [list(op.sizes)],
                "output_dtypes": [op.dtype],
                "state": "completed" if finished else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": finished,
                "timeout_ms": 600_000,
                "is_p2p": op.peer is not None,
                **({"frames": _frames(op)} if frames else {}),
            }
        )
    return entries


def _frames(op: Op) -> list[dict[str, Any]]:
    return [
        {
            "name": op.name,
            "filename": "/opt/lib/python3.11/site-packages/torch/distributed/c10d.py",
            "line": 3,
        },
        {"name": "step", "filename": "/work/train.py", "line": op.line},
        {"name": "main", "filename": "/work/train.py", "line": 99},
    ]


def write(folder: Path, job: Job, *, form: str = "pickle", **how: Any) -> str:
    """A folder of dumps as torch names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, document in documents(job, **how).items():
        if form == "json":
            text = json.dumps(
                document | {"pg_status": _as_text(document.get("pg_status", {}))}, sort_keys=True
            )
            (folder / f"nccl_trace_rank_{rank}.json").write_text(text)
        else:
            (folder / f"_dump_{rank}").write_bytes(pickle.dumps(document, 2))
    return str(folder)


def _as_text(status: dict[str, dict[str, int]]) -> dict[str, dict[str, str]]:
    """torch's JSON has those numbers as text."""
    return {key: {name: str(number) for name, number in each.items()} for key, each in status.items()}


def data_parallel(world: int = 8, steps: int = 6, sync: bool = True) -> Job:
    """DDP: three buckets a step, and the loss is read at its end."""
    programs = {
        rank: [
            Op("0", "all_reduce", (size,), sync=sync and size == 300, line=20 + size)
            for _ in range(steps)
            for size in (100, 200, 300)
        ]
        for rank in range(world)
    }
    return Job({"0": ("default_pg", tuple(range(world)))}, programs)


def pipelined(steps: int = 4) -> Job:
    """Sixteen ranks: two stages of two replicas of four tensor-parallel ranks, experts across the second stage."""
    groups: dict[str, tuple[str, tuple[int, ...]]] = {"0": ("default_pg", tuple(range(16)))}
    for first in (0, 4, 8, 12):
        groups[str(10 + first)] = ("TENSOR_MODEL_PARALLEL_GROUP", tuple(range(first, first + 4)))
    for first in range(8):
        groups[str(30 + first)] = ("PIPELINE_MODEL_PARALLEL_GROUP", (first, first + 8))
    for first in (0, 1, 2, 3, 8, 9, 10, 11):
        groups[str(50 + first)] = ("DATA_PARALLEL_GROUP", (first, first + 4))
    groups["72"] = ("EXPERT_MODEL_PARALLEL_GROUP", tuple(range(8, 16)))
    return Job(groups, {rank: _stage(rank, steps) for rank in range(16)})


def _stage(rank: int, steps: int) -> list[Op]:
    tensor = str(10 + rank // 4 * 4)
    pipeline = str(30 + rank % 8)
    data = str(50 + rank - 4 * (rank // 4 % 2))
    peer = rank + 8 if rank < 8 else rank - 8
    layer = [Op(tensor, "_all_gather_base", (2048, 5120)), Op(tensor, "_reduce_scatter_base", (8192, 5120))]
    one: list[Op] = []
    if rank < 8:
        one += [*layer, Op(pipeline, "send", peer=peer), Op(pipeline, "recv", peer=peer), *layer]
    else:
        experts = [
            Op("72", "all_to_all", (2048 + rank, 5120), "BFloat16"),
            Op("72", "all_to_all", (2048 - rank,), "BFloat16", sync=True),
        ]
        one += [Op(pipeline, "recv", peer=peer), *layer, *experts, *layer]
        one += [Op(pipeline, "send", peer=peer)]
    one += [Op(data, "all_reduce", (4096,), stream=1), Op("0", "all_reduce", (1,), sync=True)]
    return one * steps
