"""Writes the simulated events of a rank in the JSON format of Kineto in torch 2.x.

Times are converted from the true clock to the host's clock, in whole nanoseconds: ``ts`` is microseconds since ``baseTimeNanoseconds``
with three decimals. The layout follows Chrome traces of torch 2.4 to 2.7.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from .collectives import Collective, process_groups
from .machine import AUTOGRAD_THREAD, COMPUTE_STREAM, GLOO_THREADS, DeviceEvent, HostEvent
from .model import Config
from .program import RankProgram

FILE_NAME = "rank-{rank:05d}.pt.trace.json"
CBID = {
    "cudaMemcpyAsync": 41,
    "cudaStreamSynchronize": 131,
    "cudaEventRecord": 135,
    "cudaEventSynchronize": 137,
    "cudaStreamWaitEvent": 147,
    "cudaDeviceSynchronize": 165,
    "cudaLaunchKernel": 211,
    "cudaLaunchKernelExC": 430,
}
FLOW_CALLS = ("cudaMemcpyAsync", "cudaLaunchKernel", "cudaLaunchKernelExC")
DEVICE = {
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 84930265088,
    "computeMajor": 9,
    "computeMinor": 0,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65536,
    "warpSize": 32,
    "sharedMemPerBlock": 49152,
    "numSms": 132,
}
NEVER_DROPPED = ("nccl", "gloo", "ProfilerStep", "record_param_comms", "c10d::")

ToLocal = Callable[[float], int]


def write_trace(program: RankProgram, directory: Path) -> Path:
    """Write the rank's trace and return its path. The same program gives the same bytes."""
    config, rank = program.config, program.machine.rank
    lines = [json.dumps(_head(config, rank))[:-1] + ',"traceEvents":[']
    lines.append(",\n".join(_events(program)))
    lines.append(f'],"traceName":"./traces/{FILE_NAME.format(rank=rank)}"' + "}")
    text = "\n".join(lines).encode()
    path = directory / FILE_NAME.format(rank=rank)
    if config.compressed:
        path = path.with_name(path.name + ".gz")
        text = gzip.compress(text, compresslevel=1, mtime=0)
    path.write_bytes(text)
    return path


def local_clock(config: Config, rank: int) -> ToLocal:
    """A function from true microseconds to nanoseconds after ``baseTimeNanoseconds`` on the clock of the rank's host."""
    clock = config.clock(rank)
    origin_ns, rate = config.start_ns + clock.offset_ns, 1000.0 * (1.0 + clock.drift_ppm * 1e-6)
    return lambda true_us: origin_ns + round(true_us * rate)


def _head(config: Config, rank: int) -> dict[str, object]:
    """The content of the file without the events."""
    on_cpu = config.backend == "gloo"
    backend = "cpu:gloo,cuda:gloo" if on_cpu else "cuda:nccl"
    groups = [
        {
            "pg_name": group.name,
            "pg_desc": group.description,
            "backend_config": backend,
            "pg_size": len(group.ranks),
            "ranks": list(group.ranks),
        }
        for group in process_groups(config)
        if rank in group.ranks
    ]
    distributed: dict[str, object] = {
        "backend": config.backend,
        "rank": rank,
        "world_size": config.world_size,
        "pg_count": len(groups),
        "pg_config": groups,
    }
    cuda = {"cuda_runtime_version": 12040, "cuda_driver_version": 12040}
    if not on_cpu:
        distributed["nccl_version"] = "2.21.5"
    devices = 0 if on_cpu else config.host_sizes()[config.host_of(rank)]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": index, **DEVICE} for index in range(devices)],
        **({} if on_cpu else cuda),
        "record_shapes": 1,
        "distributedInfo": distributed,
        "trace_id": f"{config.seed:016X}{rank:016X}",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": config.base_time_ns,
    }


def _events(program: RankProgram) -> Iterator[str]:
    """Yields each event as JSON text."""
    config, machine = program.config, program.machine
    rank, to_local = machine.rank, local_clock(config, machine.rank)
    pid, device = 41000 + rank, config.local_rank(rank)
    host, accelerator = recorded_events(program)
    threads = tuple(pid + offset for offset in (0, 700, 4, 6))
    calls = _host_lines(host, pid, threads, to_local)
    kernels = _device_lines(accelerator, device, to_local)
    start_ns, end_ns = to_local(program.step_start_us[0]), to_local(machine.now_us)
    streams = sorted({network.group.stream for network in program.networks.values()})
    yield from _names(pid, threads, None if config.backend == "gloo" else device, streams, _ts(start_ns))
    yield from calls
    yield from kernels
    span = f'"ts":{_ts(start_ns)},"dur":{_ts(end_ns - start_ns)},"pid":"Spans","tid":"PyTorch Profiler"'
    yield f'{{"ph":"X","cat":"Trace",{span},"name":"PyTorch Profiler (0)","args":{{"Op count":0}}}}'
    yield (f'{{"name":"Record Window End","ph":"i","s":"g","pid":"","tid":"","ts":{_ts(end_ns)}}}')


def recorded_events(program: RankProgram) -> tuple[list[HostEvent], list[DeviceEvent]]:
    """The rank's events without those that the recording lost by its configuration."""
    config, machine = program.config, program.machine
    host, device = sorted(machine.host_events, key=_sort_key), sorted(machine.device_events, key=_sort_key)
    collectives = _own_collectives(program)
    lost = config.first_collectives_lost.get(machine.rank, 0)
    if lost and config.backend == "gloo":
        lost_ids = {identity for c in collectives[:lost] for identity in c.identity[machine.rank]}
        host = [event for event in host if event.external not in lost_ids]
    elif lost:
        lost_ids = {c.identity[machine.rank][0] for c in collectives[:lost]}
        device = [event for event in device if not (_is_nccl(event) and event.external in lost_ids)]
    late = config.window_starts_late.get(machine.rank, 0)
    if late:
        cut_us = collectives[late - 1].end_us[machine.rank]
        host = [event for event in host if event.start_us > cut_us]
        device = [event for event in device if event.start_us > cut_us]
    if not config.step_annotations:
        host = [event for event in host if not event.name.startswith("ProfilerStep")]
    if config.unrecorded and (not config.unrecorded_on or machine.rank in config.unrecorded_on):
        host = [event for event in host if not {event.category, event.name} & set(config.unrecorded)]
        device = [event for event in device if not {event.category, event.name} & set(config.unrecorded)]
    if config.dropped_event_fraction > 0.0:
        chance = random.Random(f"dropped {config.seed} {machine.rank}")
        host = [event for event in host if _is_kept(event, config, chance)]
        device = [event for event in device if _is_kept(event, config, chance)]
    return host, device


def _own_collectives(program: RankProgram) -> list[Collective]:
    """The recorded collectives of the rank, sorted by its own arrival."""
    rank = program.machine.rank
    own = {id(c): c for network in program.networks.values() for c in network.collectives if c.step >= 0}
    return sorted(own.values(), key=lambda collective: collective.arrival_us[rank])


def _is_kept(event: HostEvent | DeviceEvent, config: Config, chance: random.Random) -> bool:
    is_never_dropped = config.dropped_scope == "compute" and event.name.startswith(NEVER_DROPPED)
    return chance.random() >= config.dropped_event_fraction or is_never_dropped


def _is_nccl(event: DeviceEvent) -> bool:
    return event.name.startswith("nccl")


def _sort_key(event: HostEvent | DeviceEvent) -> tuple[float, float, int]:
    """Sort key: by start, parents before their children. An operator's External id is lower than those inside it."""
    return event.start_us, -event.end_us, event.external


def _ts(nanoseconds: int) -> str:
    """Nanoseconds as microseconds with three decimals."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


@lru_cache(maxsize=4096)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _host_lines(
    events: Iterable[HostEvent], pid: int, threads: tuple[int, ...], to_local: ToLocal
) -> Iterator[str]:
    for index, (category, name, thread, start_us, end_us, external, correlation, more) in enumerate(events):
        start_ns = to_local(start_us)
        ts, dur = _ts(start_ns), _ts(to_local(end_us) - start_ns)
        where = f'"pid":{pid},"tid":{threads[thread]},"ts":{ts}'
        if correlation:
            args = f'"External id":{external},"cbid":{CBID[name]},"correlation":{correlation}'
        else:
            args = f'"External id":{external},"Record function id":{external}{more},"Ev Idx":{index}'
        yield f'{{"ph":"X","cat":"{category}","name":{_quoted(name)},{where},"dur":{dur},"args":{{{args}}}}}'
        if name in FLOW_CALLS:
            yield f'{{"ph":"s","id":{correlation},{where},"cat":"ac2g","name":"ac2g"}}'


def _device_lines(events: Iterable[DeviceEvent], device: int, to_local: ToLocal) -> Iterator[str]:
    for category, name, stream, start_us, end_us, external, correlation, more in events:
        start_ns = to_local(start_us)
        ts, dur = _ts(start_ns), _ts(to_local(end_us) - start_ns)
        where = f'"pid":{device},"tid":{stream},"ts":{ts}'
        args = f'"External id":{external}'
        if category != "gpu_user_annotation":
            args += f',"device":{device},"context":1,"stream":{stream},"correlation":{correlation}'
        if category == "kernel":
            args += (
                ',"queued":0,"registers per thread":96,"shared memory":0,"grid":[264,1,1],"block":[256,1,1]'
            )
        what = f'"cat":"{category}","name":{_quoted(name)},{where},"dur":{dur}'
        yield f'{{"ph":"X",{what},"args":{{{args}{more}}}}}'
        if correlation:
            yield f'{{"ph":"f","id":{correlation},{where},"cat":"ac2g","name":"ac2g","bp":"e"}}'


def _names(
    pid: int, threads: tuple[int, ...], device: int | None, streams: list[int], ts: str
) -> Iterator[str]:
    """Metadata events: names of processes, threads and streams."""
    rows: list[tuple[str, int, int, str, object]] = []
    processes = [(pid, "CPU", pid)]
    names = {0: "pt_main_thread"}
    if device is None:
        names.update(dict.fromkeys(GLOO_THREADS, "pt_gloo_runloop"))
    else:
        names[AUTOGRAD_THREAD] = "pt_autograd_0"
        processes.append((device, f"GPU {device}", 5_000_000 + device))
        for stream in (COMPUTE_STREAM, *streams):
            rows.append(("thread_name", device, stream, "name", f"stream {stream} "))
            rows.append(("thread_sort_index", device, stream, "sort_index", stream))
    for process, label, order in processes:
        rows.append(("process_name", process, 0, "name", "python3"))
        rows.append(("process_labels", process, 0, "labels", label))
        rows.append(("process_sort_index", process, 0, "sort_index", order))
    for thread, name in ((threads[index], name) for index, name in names.items()):
        rows.append(("thread_name", pid, thread, "name", f"thread {thread} ({name})"))
        rows.append(("thread_sort_index", pid, thread, "sort_index", thread))
    for name, process, thread, key, value in rows:
        args = json.dumps({key: value})
        yield f'{{"name":"{name}","ph":"M","ts":{ts},"pid":{process},"tid":{thread},"args":{args}}}'
