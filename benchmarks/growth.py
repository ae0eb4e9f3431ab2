"""How each stage of the analysis grows with steps, collectives and ranks: a table, and a failure where it grows too fast.

    python benchmarks/growth.py [--axis steps ...] [--most 2000] [--repetitions 3] [--plot FILE.svg]

One axis grows at a time, the others stay small: windows of 5 to 2,000 steps, 4 to 400 collectives and 30 to 900 kernels a step,
2 to 512 ranks, 5,000 to 150,000 distinct names of events; steps also with Python stacks, in the time format of before 2024, as exports of
Nsight Systems, and as step logs, with stack samples too; of a run directory of 1,000 and 10,000 ranks, listing and opening.
All jobs are generated. Each figure is the median CPU time of some processes, and all sizes of an axis take turns. The slope
of a stage is that of the logarithms of its seconds and of the events between the two largest sizes, told as the median over
the turns (least to most): 1 where twice the events take twice the time. Above 1.1 in every turn, in a stage that takes long
enough to tell, the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.loading import matrix  # noqa: E402

MOST_SLOPE = 1.1
LEAST_S = 0.2
"""CPU time at the largest size from which on a stage's slope is judged: shorter ones are mostly start and scatter."""
STAGES_PROGRAM = ROOT / "benchmarks" / "loading" / "stages.py"


@dataclass(frozen=True)
class Axis:
    """What grows, and how a job of that size is made."""

    sizes: Sequence[int]
    make: Callable[[Path, int], None]
    only: str = "analysis"
    """What of it is done, see ``loading/stages.py``."""


AXES = {
    "steps": Axis((5, 50, 500, 2000), lambda place, n: matrix.traces(place, steps=n)),
    "steps, with stacks": Axis((5, 50, 500), lambda place, n: matrix.traces(place, steps=n, stacks=True)),
    "steps, old times": Axis((5, 50, 500), lambda place, n: matrix.traces(place, steps=n, old=True)),
    "steps, Nsight": Axis((5, 50, 500), lambda place, n: matrix.exports(place, steps=n)),
    "ranks, Nsight": Axis((2, 8, 64), lambda place, n: matrix.exports(place, ranks=n, steps=4)),
    "collectives a step": Axis((4, 40, 400), lambda place, n: matrix.traces(place, collectives=n)),
    "kernels a step": Axis(
        (30, 300, 900), lambda place, n: matrix.traces(place, ranks=64, steps=4, kernels=n)
    ),
    "ranks": Axis((2, 8, 64, 512), lambda place, n: matrix.traces(place, ranks=n, steps=4)),
    "steps of logs": Axis((50, 500, 5000, 20000), lambda place, n: matrix.logs(place, 2, n)),
    "ranks of logs": Axis((2, 8, 64, 512), lambda place, n: matrix.logs(place, n, 50)),
    "ranks of logs, sampled": Axis((8, 64, 512), lambda place, n: matrix.sampled(place, n, 50)),
    "distinct names": Axis((5_000, 50_000, 150_000), matrix.names),
    "rank folders": Axis((1_000, 10_000), matrix.folders, only="opening"),
}


@dataclass(frozen=True)
class Point:
    """One size of one axis."""

    size: int
    events: int
    """Rows of traces; steps of logs where there are no traces."""
    peak_mb: float
    turns: Sequence[dict[str, float]]
    """CPU seconds by stage of each turn."""

    @property
    def cpu_s(self) -> dict[str, float]:
        """Of each stage, the median of the turns."""
        return {stage: median(turn[stage] for turn in self.turns) for stage in self.turns[0]}


def main() -> int:
    """Measure; 1 where a stage grows too fast."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", nargs="*", choices=list(AXES), default=list(AXES))
    parser.add_argument("--most", type=int, default=10**9, help="leave out larger sizes")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="SVG of seconds by events")
    options = parser.parse_args()
    measured: dict[str, list[Point]] = {}
    for name in options.axis:
        sizes = [size for size in AXES[name].sizes if size <= options.most]
        measured[name] = points_of(AXES[name], sizes, options.repetitions)
        print_table(name, measured[name])
    if options.plot is not None:
        options.plot.write_text(
            matrix.plot({n: [(p.events, sum(p.cpu_s.values())) for p in m] for n, m in measured.items()})
        )
    steep = [line for name, points in measured.items() for line in too_steep(name, points)]
    print("\n".join(steep) or f"no slope above {MOST_SLOPE}")
    return 1 if steep else 0


def points_of(axis: Axis, sizes: Sequence[int], repetitions: int) -> list[Point]:
    """All sizes in turn, so that what else the machine does meets them alike."""
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-bench-") as folder:
        places = [Path(folder) / str(size) for size in sizes]
        for place, size in zip(places, sizes, strict=True):
            axis.make(place, size)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(Path(folder) / "cache"),
        }
        runs: list[list[Any]] = [[] for _ in sizes]
        for _ in range(repetitions):
            for place, of_size in zip(places, runs, strict=True):
                command = [sys.executable, str(STAGES_PROGRAM), str(place), axis.only]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
                of_size.append(json.loads(done.stdout))
    return [
        Point(
            size,
            of_size[0]["rows"] or of_size[0]["steps"],
            max(run["peak_mb"] for run in of_size),
            [run["cpu_s"] for run in of_size],
        )
        for size, of_size in zip(sizes, runs, strict=True)
    ]


def slopes(before: Point, after: Point, stage: str) -> list[float]:
    """How the stage's seconds grow with the events, in each turn, from the least; NaN where there is nothing to compare."""
    if after.events <= before.events:
        return [math.nan]
    grown = [
        more[stage] / less[stage]
        for less, more in zip(before.turns, after.turns, strict=True)
        if less[stage] > 0 and more[stage] > 0
    ]
    return sorted(math.log(times) / math.log(after.events / before.events) for times in grown) or [math.nan]


def too_steep(name: str, points: Sequence[Point]) -> list[str]:
    """One line for each stage whose slope is too large to be chance."""
    if len(points) < 2:
        return []
    last, before = points[-1], points[-2]
    return [
        f"FAILED: {stage} grows with {name} by a slope of {told(slopes(before, last, stage))}"
        for stage, seconds in last.cpu_s.items()
        if seconds >= LEAST_S and min(slopes(before, last, stage)) > MOST_SLOPE
    ]


def told(of_turns: Sequence[float]) -> str:
    """``0.98 (0.91 to 1.04)``"""
    return f"{median(of_turns):.2f} ({min(of_turns):.2f} to {max(of_turns):.2f})"


def print_table(name: str, points: Sequence[Point]) -> None:
    """Markdown: CPU seconds of each stage and size, seconds for a million events of the largest, and the slope."""
    print(f"\n| {name}: | " + " | ".join(f"{p.size:,}" for p in points) + " | s a million | slope |")
    print("| --- |" + " --- |" * (len(points) + 2))
    print("| events | " + " | ".join(f"{p.events:,}" for p in points) + " | | |")
    for stage in points[-1].cpu_s:
        if points[-1].cpu_s[stage] < 0.005:
            continue
        seconds = " | ".join(f"{p.cpu_s[stage]:.3f}" for p in points)
        grows = told(slopes(points[-2], points[-1], stage)) if len(points) > 1 else ""
        print(f"| {stage} | {seconds} | {points[-1].cpu_s[stage] / points[-1].events * 1e6:.2f} | {grows} |")
    print("| peak MB | " + " | ".join(f"{p.peak_mb:.0f}" for p in points) + " | | |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
