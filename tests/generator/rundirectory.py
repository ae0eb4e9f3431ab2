"""Writes a generated job as a run directory, like the launcher and the hook: step logs of the whole run, and a profiler window at its
end.

The warm-up of the configuration is the part of the run outside the window. Plants with a negative ``When.first`` act in it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from .kineto import local_clock, write_trace
from .model import Config
from .program import RankProgram
from .simulate import Simulation, simulate

LINES = {1: 20, 2: 24, 3: 26, 4: 30, 5: 33, 6: 36}
"""Lines of train.py by number of the source line in the logs: loader, model, backward, collective, optimizer, save."""


def generate_run(config: Config, directory: str | os.PathLike[str]) -> Simulation:
    """Write manifest.json and, per rank, rank.json, steps.jsonl and trace.json.gz. Returns the simulation."""
    folder = Path(directory)
    simulation = simulate(config)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"schema": "ddpdoctor.run/1", "world_size": config.world_size}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for program in simulation.programs:
        rank = program.machine.rank
        place = folder / "ranks" / f"{rank:05d}"
        place.mkdir(parents=True)
        (place / "rank.json").write_text(json.dumps(_rank(config, rank)))
        lines = _lines(program) + (_device_lines(program) if config.device_times else [])
        (place / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_trace(program, place).rename(place / "trace.json.gz")
    return simulation


def _rank(config: Config, rank: int) -> dict[str, object]:
    on_cpu = config.backend == "gloo"
    ddp = {"id": 0, "module": "Net", "where": 2, "bucket_cap_bytes": 26_214_400}
    ddp |= {"bucket_bytes": list(config.bucket_bytes), "parameters_bytes": sum(config.bucket_bytes)}
    loader = {
        "id": 0,
        "where": 1,
        "num_workers": 2 if config.loader_workers else 0,
        "batch_size": config.batch_size,
    }
    return {
        "schema": "ddpdoctor.rank/2",
        "rank": rank,
        "local_rank": config.local_rank(rank),
        "world_size": config.world_size,
        "host": f"node{config.host_of(rank)}",
        "pid": 1000 + rank,
        "attempt": 0,
        "job_id": "generated",
        "started_ns": config.base_time_ns + config.start_ns,
        "torch": "2.13.0",
        "backend": config.backend,
        "device": "cpu" if on_cpu else f"cuda:{config.local_rank(rank)}",
        "ddp": [ddp],
        "loaders": [loader],
        "optimizers": [{"id": 0, "type": "SGD", "where": 5}],
        "window": {"steps": [config.warmup_steps, config.warmup_steps + config.steps], "state": "saved"},
    }


def _lines(program: RankProgram) -> list[dict[str, object]]:
    """The lines of steps.jsonl. A step lasts from the end of one optimizer step to the end of the next."""
    config, machine = program.config, program.machine
    to_local = local_clock(config, machine.rank)
    lines: list[dict[str, object]] = [{"schema": "ddpdoctor.steps/2"}]
    lines += [
        {"where": number, "file": "train.py", "line": line, "function": "main"}
        for number, line in LINES.items()
    ]
    start_us, events = 0.0, []
    for kind, begun_us, ended_us, fields in machine.hook_events:
        entry = {
            "k": kind,
            "s": round((begun_us - start_us) * 1000),
            "d": round((ended_us - begun_us) * 1000),
        }
        entry |= fields
        if kind == "bwd":
            base_us, ready_us = entry.pop("base_us"), entry.pop("ready_us")
            if entry["sync"]:
                entry["base"] = round((base_us - start_us) * 1000)
                entry["ready"] = [round((at - base_us) * 1000) for at in ready_us]
        events.append(entry)
        if kind == "opt":
            times = [config.base_time_ns + to_local(at) for at in (start_us, ended_us)]
            step = sum("step" in line for line in lines)
            events.sort(key=lambda event: event["s"])
            marks = _marks(config, step)
            lines.append({"step": step, "t": times, "cpu": 1, "runq": 0, "ev": events, "marks": marks})
            start_us, events = ended_us, []
    return lines


def _device_lines(program: RankProgram) -> list[dict[str, object]]:
    """The lines with the times of each step's CUDA events, on a clock of the device. A step ends there when its optimizer does."""
    lines: list[dict[str, object]] = []
    start_us, times = 0.0, []
    for name, at_us in program.machine.device_marks:
        times.append([name, round((at_us - start_us) * 1000)])
        if name == "opt_end":
            times.append(["end", times[-1][1]])
            lines.append({"device": len(lines), "at": round(start_us * 1000), "times": times})
            start_us, times = at_us, []
    return lines


def _marks(config: Config, step: int) -> list[str]:
    if step < config.warmup_steps:
        return []
    return ["profiler_open", "profiled"] if step == config.warmup_steps else ["profiled"]
