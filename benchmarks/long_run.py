"""What a week costs: a generated run of millions of steps, its bytes on disk and what its analysis takes.

    python benchmarks/long_run.py [--steps 3000000] [--ranks 2] [--whole]

Writes the logs as the hook does, through spools, so that they are thinned on disk as a job's are; with ``--whole``, as
they would be without. Rank 1 takes 20 ms longer over its data, so the diagnosis is known. Then the analysis is run in a
process of its own, and its peak memory, CPU time and verdict are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.rundir import RANK_SCHEMA, RUN_SCHEMA, STEPS_FILE, STEPS_SCHEMA, new_run_id, write_json
from ddpdoctor.rundir.compaction import DiskBudget, rank_budget
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.spool import Spool, make_spool_root

EPOCH_NS = 1_760_000_000_000_000_000
STEP_NS = 200_000_000
MS = 1_000_000
_DRAIN_STEPS = 20_000
"""Some eight megabytes: what a spool holds while the run directory is slow."""
_ANALYSIS = """
import json, resource, sys, time
from ddpdoctor.analysis import Options, analyze
found = analyze([sys.argv[1]], Options(cache=False))
print(json.dumps({
    "cpu_s": time.process_time(),
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    "verdict": found.verdict.headline,
    "steps": [found.steps.count, found.steps.measured, found.steps.set_aside],
}))
"""


def lines(rank: int, steps: int) -> Iterator[bytes]:
    """A rank's log: data, forward, backward and optimizer of each step; all but rank 1 wait for it in the reduction."""
    yield json.dumps({"schema": STEPS_SCHEMA}).encode() + b"\n"
    for number, line in ((1, 20), (2, 31)):
        yield (
            json.dumps({"where": number, "file": "train.py", "line": line, "function": "main"}).encode()
            + b"\n"
        )
    data = 25 * MS if rank == 1 else 5 * MS
    for step in range(steps):
        start = EPOCH_NS + step * STEP_NS
        # A little of each step's own, lest all of them be alike.
        own = step * 7919 % 1000 * 1000
        events = (
            f'{{"k":"data","w":1,"l":0,"n":32,"s":1000,"d":{data + own}}},'
            f'{{"k":"fwd","w":2,"m":0,"g":1,"e":4096,"s":{data + own + 2 * MS},"d":{50 * MS}}},'
            f'{{"k":"bwd","w":2,"m":0,"sync":true,"base":{data + own + 53 * MS},"ready":[{30 * MS},{60 * MS}],'
            f'"s":{data + own + 54 * MS},"d":{146 * MS - data - own - 54 * MS}}},'
            f'{{"k":"opt","w":2,"o":0,"s":{147 * MS},"d":{13 * MS}}}'
        )
        yield (
            f'{{"step":{step},"t":[{start},{start + STEP_NS}],"cpu":{150 * MS},"runq":0,"ev":[{events}]}}\n'
        ).encode()


def write_run(run: Path, ranks: int, steps: int, whole: bool) -> float:
    """Write the run; returns the seconds that copying to it took, thinning included."""
    run.mkdir()
    document = {"schema": RUN_SCHEMA, "run_id": new_run_id(), "world_size": ranks, "ended_ns": EPOCH_NS}
    write_json(str(run / "manifest.json"), document)
    root = make_spool_root(str(run))
    copying_s = 0.0
    try:
        for rank in range(ranks):
            spool, budget = Spool(root, rank, str(run)), None if whole else DiskBudget(rank_budget(ranks))
            place = Path(drain(spool.directory))
            describe = {
                "schema": RANK_SCHEMA,
                "rank": rank,
                "local_rank": rank,
                "world_size": ranks,
                "host": "node0",
            }
            write_json(str(place / "rank.json"), {**describe, "pid": 1, "device": "cpu", "backend": "gloo"})
            for number, line in enumerate(lines(rank, steps)):
                spool.write(STEPS_FILE, line)
                if number % _DRAIN_STEPS == 0:
                    begun_s = time.perf_counter()
                    drain(spool.directory, budget=budget)
                    copying_s += time.perf_counter() - begun_s
            spool.close()
            drain(spool.directory, remove=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return copying_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="without thinning on disk")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        copying_s = write_run(run, asked.ranks, asked.steps, asked.whole)
        size = sum(path.stat().st_size for path in run.rglob(STEPS_FILE))
        print(
            f"{asked.ranks} ranks, {asked.steps:,} steps: {size / 1e6:,.0f} MB on disk, copied in {copying_s:.0f} s"
        )
        done = subprocess.run(
            [sys.executable, "-c", _ANALYSIS, str(run)],
            stdout=subprocess.PIPE,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found = json.loads(done.stdout)
        print(f"analysis: {found['cpu_s']:.1f} CPU s, {found['peak_mb']:,.0f} MB at most")
        print(
            f"steps: {found['steps'][0]:,} recorded, {found['steps'][1]:,} measured, set aside: {found['steps'][2]}"
        )
        print(found["verdict"])


if __name__ == "__main__":
    main()
