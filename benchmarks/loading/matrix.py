"""Generated jobs of any size for ``benchmarks/growth.py``, and its plot."""

from __future__ import annotations

import gzip
import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.long_run import EPOCH_NS, MS, STEP_NS, lines, write_run
from ddpdoctor.rundir import (
    MANIFEST_FILE,
    RANK_FILE,
    RANK_SCHEMA,
    RUN_SCHEMA,
    SAMPLES_FILE,
    STEPS_FILE,
    new_run_id,
)
from ddpdoctor.trace import load_traces
from tests.generator import Config, Plant, generate
from tests.trace.nsight_export import export

RANKS_A_HOST = 8
_NAMES_A_STEP = 100
"""Operators and kernels that a step of the generated job has at least, on both ranks."""
_LINES = 40
_SAMPLES_A_STEP = 10
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#c77d0a", "#4d4d4d", "#0a9396")


def traces(
    place: Path,
    *,
    ranks: int = 2,
    steps: int = 20,
    collectives: int = 4,
    kernels: int = 30,
    stacks: bool = False,
    old: bool = False,
) -> None:
    """Traces of a job on accelerators, eight ranks a host, with one slow rank. ``kernels``: in forward and backward pass of a step, each
    with about four events beside it; ``old``: times as before 2024."""
    config = Config(
        world_size=ranks,
        hosts=(RANKS_A_HOST,) * (ranks // RANKS_A_HOST),
        steps=steps,
        forward_kernels=kernels // 3,
        backward_kernels=max(kernels * 2 // 3, collectives),
        bucket_bytes=(5_000_000,) * collectives,
        plants=(Plant("slow_data", ranks=(ranks - 1,), ms=4.0),),
    )
    generate(config, place)
    if stacks or old:
        for file in place.rglob("*.json*"):
            _rewritten(file, stacks=stacks, old=old)


def exports(place: Path, *, ranks: int = 2, steps: int = 20) -> None:
    """The same as Nsight Systems would have exported it, a file for the ranks of each host."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "traces"
        traces(source, ranks=ranks, steps=steps)
        read = load_traces([str(file) for file in sorted(source.rglob("*.json*"))], jobs=1).traces
    place.mkdir()
    for number in range(0, len(read), RANKS_A_HOST):
        export(place / f"host{number // RANKS_A_HOST}.sqlite", read[number : number + RANKS_A_HOST])


def logs(place: Path, ranks: int, steps: int) -> None:
    """A run directory without traces, its logs whole."""
    write_run(place, ranks, steps, whole=True)


def sampled(place: Path, ranks: int, steps: int) -> None:
    """The same with stack samples, of which some had to wait for Python's lock."""
    logs(place, ranks, steps)
    places = [
        {"where": line, "file": f"train/part{line % 7}.py", "line": line, "function": "main"}
        | ({"by": line - 1} if line > 1 else {})
        for line in range(1, _LINES + 1)
    ]
    known = "".join(json.dumps(each) + "\n" for each in places)
    drawn = random.Random(1)
    for rank in range(ranks):
        taken = []
        for step in range(steps):
            offsets = sorted(drawn.randrange(STEP_NS) for _ in range(_SAMPLES_A_STEP))
            rows = [[at, drawn.randint(1, _LINES), drawn.randint(1, _LINES)] for at in offsets]
            waited = [drawn.choice((0, 0, 0, 2 * MS, 6 * MS)) for _ in offsets]
            taken.append(json.dumps({"t": EPOCH_NS + step * STEP_NS, "s": rows, "h": waited}) + "\n")
        (place / "ranks" / f"{rank:05d}" / SAMPLES_FILE).write_text(known + "".join(taken))


def names(place: Path, distinct: int) -> None:
    """Traces of so many distinct names of operators and kernels."""
    traces(place, steps=max(5, distinct // _NAMES_A_STEP))
    files = sorted(place.rglob("*.json*"))
    for file in files:
        _rewritten(file, distinct=distinct // len(files))


def folders(place: Path, ranks: int) -> None:
    """A run directory of many ranks with a step each."""
    place.mkdir()
    document = {"schema": RUN_SCHEMA, "run_id": new_run_id(), "world_size": ranks, "ended_ns": EPOCH_NS}
    (place / MANIFEST_FILE).write_text(json.dumps(document))
    described = {"schema": RANK_SCHEMA, "world_size": ranks, "pid": 1, "device": "cpu", "backend": "gloo"}
    log = b"".join(lines(0, 1))
    for rank in range(ranks):
        own = {**described, "rank": rank, "local_rank": rank % 8, "host": f"node{rank // 8}"}
        folder = place / "ranks" / f"{rank:05d}"
        folder.mkdir(parents=True)
        (folder / RANK_FILE).write_text(json.dumps(own))
        (folder / STEPS_FILE).write_bytes(log)


def plot(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """SVG: CPU seconds by events, both logarithmic; a dashed line grows as the events do."""
    points = [point for line in lines.values() for point in line]
    left, right = (edge(math.log10(x) for x, _ in points) for edge in (min, max))
    low, high = (edge(math.log10(y) for _, y in points) for edge in (min, max))

    def at(x: float, y: float) -> str:
        across = 60 + 540 * (math.log10(x) - left) / (right - left)
        return f"{across:.1f},{350 - 320 * (math.log10(y) - low) / (high - low):.1f}"

    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 390" font-family="sans-serif" font-size="12">',
        '<rect width="840" height="390" fill="white"/>',
        f'<text x="60" y="380">{10**left:,.0f} to {10**right:,.0f} events (rows of traces, steps of logs)</text>',
        f'<text x="60" y="20">{10**low:.2g} to {10**high:.2g} CPU s, both axes logarithmic</text>',
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in line)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [
            f'<circle cx="{place[0]}" cy="{place[1]}" r="3" fill="{colour}"/>'
            for place in (at(x, y).split(",") for x, y in line)
        ]
        drawn.append(f'<text x="620" y="{40 + 18 * number}" fill="{colour}">{name}</text>')
    highest = 10 ** min(right, left + high - low)
    ideal = f"{at(10**left, 10**low)} {at(highest, 10 ** (low + math.log10(highest) - left))}"
    drawn.append(f'<polyline points="{ideal}" fill="none" stroke="#999" stroke-dasharray="4 4"/>')
    return "\n".join([*drawn, "</svg>\n"])


def _rewritten(file: Path, *, stacks: bool = False, old: bool = False, distinct: int = 0) -> None:
    packed = file.suffix == ".gz"
    text = file.read_bytes()
    document = json.loads(gzip.decompress(text) if packed else text)
    events: list[dict[str, Any]] = document["traceEvents"]
    if stacks:
        document["with_stack"] = 1
        events += [
            {**event, "cat": "python_function", "name": f"{source}({line}): {function}", "args": {}}
            for event in events
            if event.get("cat") == "cpu_op"
            for source, line, function in (
                ("train.py", 40, "main"),
                ("torch/nn/modules/module.py", 1500, "_call_impl"),
            )
        ]
    plain = [
        event
        for event in events
        if (event.get("cat") == "cpu_op" and event["name"].startswith("aten::"))
        or (event.get("cat") == "kernel" and not event["name"].startswith("nccl"))
    ]
    for number, event in zip(range(distinct), plain, strict=False):
        event["name"] += f"<{file.name}, {number}>"
    if old:
        base_us = document.pop("baseTimeNanoseconds") // 1000
        for event in events:
            if "ts" in event:
                event["ts"] = base_us + int(event["ts"])
                event["dur"] = int(event.get("dur", 0))
    whole = json.dumps(document).encode()
    file.write_bytes(gzip.compress(whole, 6) if packed else whole)
