"""Recorded runs as they would be had the wall clock of a host been set meanwhile, or had ranks been stopped."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.measure.steplogs import lines_of, steps_of, write_lines


def start_of(folder: Path, step: int, rank: int = 0) -> int:
    """Epoch ns at which a rank's step began."""
    return next(line["t"][0] for line in steps_of(folder, rank) if line["step"] == step)


def length_of(folder: Path, step: int, rank: int = 0) -> int:
    """ns"""
    return next(line["t"][1] - line["t"][0] for line in steps_of(folder, rank) if line["step"] == step)


def set_clock(folder: Path, *settings: tuple[int, int], host: str | None = None) -> None:
    """What was read from the wall clock at the first of a pair or later is the second more, in ns. A step reads it once, at
    its start."""
    _reread(folder, lambda at: at + sum(by for moment, by in settings if at >= moment), host)


def slew_clock(folder: Path, moment_ns: int, rate: float) -> None:
    """From ``moment_ns`` on the wall clock goes faster by this rate."""
    _reread(folder, lambda at: at + round(max(0, at - moment_ns) * rate), None)


def _reread(folder: Path, clock: Callable[[int], int], host: str | None) -> None:
    for rank in sorted((folder / "ranks").iterdir()):
        if host is not None and json.loads((rank / "rank.json").read_text())["host"] != host:
            continue
        _rewrite(rank / "steps.jsonl", lambda line: _step(line, clock))
        _rewrite(rank / "samples.jsonl", lambda line: _samples(line, clock))
        _retrace(rank / "trace.json.gz", clock)
    ended = folder.glob("ranks/*/rank.json") if host is not None else folder.glob("**/*.json")
    for file in ended:
        document = json.loads(file.read_text())
        if isinstance(document.get("ended_ns"), int) and host in (None, document.get("host")):
            file.write_text(json.dumps({**document, "ended_ns": clock(document["ended_ns"])}))
    for telemetry in folder.glob("hosts/*/telemetry.jsonl"):
        if host in (None, telemetry.parent.name):
            _rewrite(
                telemetry, lambda line: {**line, "t_ns": clock(line["t_ns"])} if "t_ns" in line else line
            )


def suspend(folder: Path, step: int, ns: int, ranks: tuple[int, ...] | None = None) -> None:
    """Stop the processes of ``ranks`` (all: and the launcher) for so long in the middle of this step's backward. The others
    end their backward, which waits for them, as much later. Nothing is sampled in stopped processes."""
    for place in sorted((folder / "ranks").iterdir()):
        rank = int(place.name)
        stopped = ranks is None or rank in ranks
        steps = lines_of(place / "steps.jsonl")
        line = next(line for line in steps if line.get("step") == step)
        backward = [event for event in line["ev"] if event["k"] == "bwd"][-1]
        moment = line["t"][0] + backward["s"] + backward["d"] // 2
        for event in line["ev"]:
            event["s"] += ns if event["s"] > backward["s"] else 0
        backward["d"] += ns
        if stopped and backward.get("ready"):
            backward["ready"][-1] += ns
        for other in steps:
            if "step" in other and other["step"] >= step:
                other["t"] = [other["t"][0] + (ns if other["step"] > step else 0), other["t"][1] + ns]
        write_lines(place / "steps.jsonl", steps)

        def later(at: int, moment: int = moment) -> int:
            return at + ns if at >= moment else at

        _rewrite(place / "samples.jsonl", lambda line, later=later: _samples(line, later))
        if not stopped and (place / "samples.jsonl").is_file():
            _sample_on(place / "samples.jsonl", moment, ns)
        _retrace(place / "trace.json.gz", later)
    for telemetry in folder.glob("hosts/*/telemetry.jsonl"):
        _rewrite(
            telemetry,
            lambda line: {**line, "t_ns": later(line["t_ns"])} if "t_ns" in line else line,
        )


def copied(fixture: Path, folder: Path) -> Path:
    shutil.copytree(fixture, folder)
    return folder


def _sample_on(path: Path, moment: int, ns: int, every_ns: int = 100_000_000) -> None:
    """A thread that goes on is still sampled."""
    lines = lines_of(path)
    where = next(line["where"] for line in lines if "where" in line)
    times = range(0, ns, every_ns)
    waiting = {"t": moment, "s": [[at, where, where] for at in times]}
    place = next((i for i, line in enumerate(lines) if line.get("t", 0) > moment), len(lines))
    write_lines(path, [*lines[:place], waiting, *lines[place:]])


def _step(line: dict, clock: Callable[[int], int]) -> dict:
    if "step" not in line:
        return line
    start, end = line["t"]
    return {**line, "t": [clock(start), clock(start) + end - start]}


def _samples(line: dict, clock: Callable[[int], int]) -> dict:
    if "s" not in line:
        return line
    first = clock(line["t"])
    return {"t": first, "s": [[clock(line["t"] + at) - first, *rest] for at, *rest in line["s"]]}


def _retrace(path: Path, clock: Callable[[int], int]) -> None:
    if not path.is_file():
        return
    document = json.loads(gzip.decompress(path.read_bytes()))
    base = document["baseTimeNanoseconds"]
    first = base + round(min(e["ts"] for e in document["traceEvents"] if e.get("ph") == "X") * 1000)
    document["baseTimeNanoseconds"] = base + clock(first) - first
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))


def _rewrite(path: Path, change: Callable[[dict], dict]) -> None:
    if path.is_file():
        write_lines(path, [change(line) for line in lines_of(path)])
