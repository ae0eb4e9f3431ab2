"""``python -m tests.lab.tries``: what `try --all` finds for jobs with a fault, against the same jobs without it.

Each job is recorded with its fault, what its findings suggest is tried, and the job without the fault is measured like a trial
before and after. Nobody chooses a change by hand. Outcomes are kept in a folder, one file each, and only what is not there yet is run;
``--write`` makes the page of all that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ddpdoctor.experiment import Command, own_command, run_trial

from .planting import Plant
from .running import Job, command, environment, record, write

STEPS = 150
"""Of each trial, where nothing asks for more: some seconds, as `try` itself takes of a run whose steps are as long."""
NEAR = 0.10
"""As much slower than the job without the fault counts as mended."""
_BUFFERS = (
    "class Regressor(nn.Module):",
    "class Averages(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        for n in range(150):\n            self.register_buffer(f'mean{n}', torch.zeros(1 << 12))\n\n\n"
    "class Regressor(nn.Module):",
)
_FIRST = "        self.first = nn.Linear(64, width)"
_MODEL = "args.batch))  # the model"
_UNEVEN = Plant(
    {
        "top": "TURN = [0]\n\n\nclass Length(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        TURN[0] += 1\n        if (TURN[0] + dist.get_rank()) % 2:\n            time.sleep(0.02)\n"
        "        return x.view_as(x)\n\n    @staticmethod\n    def backward(ctx, gradient):\n"
        "        if (TURN[0] + dist.get_rank()) % 2 == 0:\n            time.sleep(0.02)\n        return gradient\n\n",
        "forward": "{var} = Length.apply({var})",
    }
)
"""A step is long either in its forward or in its backward, and never the same on both ranks."""


@dataclass(frozen=True)
class Repair:
    """A fault that a setting may mend."""

    name: str
    says: str
    script: str
    fault: Plant
    both: Plant = field(default_factory=Plant)
    """What the job has with and without it."""
    step_ms: float = 15.0
    variables: dict[str, str] = field(default_factory=dict)
    """Of the job with the fault."""
    bounds: bool = False
    """Nothing that a job can train with mends it: the imitation is what counts."""


def _sleep(ms: float) -> str:
    return f"time.sleep({ms / 1e3})"


REPAIRS = (
    Repair("data-all", "all ranks' samples wait 4 ms each for storage, no workers", "mlp", Plant({"dataset": _sleep(4)})),
    Repair(
        "data-one", "one rank's samples wait 4 ms each, no workers", "mlp",
        Plant({"dataset": "if {rank} == 1:\n    " + _sleep(4)}),
    ),
    Repair("data-worker", "samples wait 5 ms each, one worker", "cnn", Plant({"dataset": _sleep(5)}), step_ms=20.0),
    Repair(
        "worker-start", "workers start anew in each short epoch, which takes 150 ms", "cnn",
        Plant({"top": "def begin(_):\n    time.sleep(0.15)\n\n"}, swaps=(("persistent_workers=True", "worker_init_fn=begin"),)),
        Plant(arguments=("--epochs", "8")), step_ms=20.0,
    ),
    Repair(
        "tiny-buckets", "buckets of 2 kB", "mlp", Plant(swaps=((_MODEL, "args.batch), bucket_cap_mb=0.002)  # the model"),)),
        Plant(arguments=("--depth", "60")),
    ),
    Repair(
        "no-no-sync", "four micro-batches, gradients reduced in each", "accumulate",
        Plant(swaps=((" if last else model.no_sync()", ""),)), Plant(arguments=("--width", "900")),
    ),
    Repair(
        "unused", "find_unused_parameters=True, and none is unused", "mlp",
        Plant(swaps=((_MODEL, "args.batch), find_unused_parameters=True)  # the model"),)),
        Plant(arguments=("--depth", "300", "--width", "16")), step_ms=5.0,
    ),
    Repair(
        "buffers", "150 buffers broadcast before each forward", "mlp",
        Plant(swaps=(_BUFFERS, (_FIRST, f"{_FIRST}\n        self.averages = Averages()"))),
        step_ms=5.0,
    ),
    Repair(
        "threads", "as many threads in each rank as would fill the machine thrice", "mlp", Plant(),
        Plant(arguments=("--width", "1200", "--depth", "4", "--batch", "64")), step_ms=5.0,
        variables={"OMP_NUM_THREADS": str(3 * (os.cpu_count() or 1))},
    ),
    Repair(
        "barrier", "a barrier between forward and backward keeps uneven ranks from evening out", "mlp",
        Plant({"between": "dist.barrier()"}), _UNEVEN,
        bounds=True,
    ),
)  # fmt: skip


def measured(repair: Repair, folder: Path, rounds: int) -> dict[str, Any]:
    """One repair, from its record to what was found."""
    random = Random(repair.name)
    job = Job(repair.script, 2, repair.step_ms)
    faulty, twin = folder / "faulty", folder / "twin"
    record(faulty, job, [repair.both, repair.fault], random, variables=repair.variables)
    write(twin, job, [repair.both])

    def words(where: Path) -> list[str]:
        return command(job, where / "train.py", repair.both.arguments, random)

    before = _twin_ms(words(twin))
    tried = [*own_command(), "try", str(faulty / "run-0"), "--all", "--rounds", str(rounds)]
    tried += [*(["--bounds"] if repair.bounds else []), "--steps", str(STEPS), "--json", str(folder / "trials.json")]  # fmt: skip
    done = subprocess.run(
        [*tried, "--", *words(faulty)],
        env={**environment(), **repair.variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    after = _twin_ms(words(twin))
    answer = json.loads((folder / "trials.json").read_text()) if done.returncode == 0 else None
    return {"name": repair.name, "says": repair.says, "twin_ms": [before, after], "answer": answer,
            "error": done.stderr.strip().splitlines()[-1:] if answer is None else []}  # fmt: skip


def _twin_ms(words: Sequence[str]) -> dict[str, float]:
    """Median and mean step of the job without the fault, as a trial measures it."""
    trial = run_trial(Command(words, environment()), {}, STEPS, 240.0)
    if trial.why:
        raise RuntimeError(trial.why)
    return {"median": float(np.median(trial.step_ms)), "mean": float(np.mean(trial.step_ms))}


@dataclass(frozen=True)
class Row:
    """What one repair comes to."""

    name: str
    says: str
    as_it_is_ms: float
    twin_ms: float
    change: str
    expected_ms: float | None
    measured_ms: float
    interval_ms: Sequence[float] | None
    kept: bool | None
    mended: bool | None
    """None where the fault costs too little to tell: with it the job is as near as a mended one."""


def row(outcome: dict[str, Any]) -> Row | None:
    """None where no change was measured."""
    answer = outcome["answer"]
    known = [each for each in (answer or {}).get("variants", []) if each["median_ms"] is not None]
    if not known:
        return None
    shown = [each for each in known if each["verdict"] == "faster"]
    best = min(shown or known, key=lambda each: each["change"])
    mean = best["baseline_mean_ms"]
    twin_ms = statistics.mean(each["median" if mean is None else "mean"] for each in outcome["twin_ms"])
    ends, expected = best["interval_ms"], best["expected_ms"]
    low, high = best["expected_range_ms"] or [expected, expected]
    kept = None if expected is None or ends is None else low <= ends[1] and high >= ends[0]
    change = " ".join(f"{name}={_shown(value)}" for name, value in best["set"].items())
    as_it_is_ms = mean if mean is not None else answer["baseline"]["median_ms"]
    # As it was measured: related to the job as it is, it would take over what that one's trials differ by, which the twin's do not.
    near_ms = (1 + NEAR) * twin_ms
    mended = statistics.mean(best["trials_ms"]) <= near_ms if as_it_is_ms > near_ms else None
    return Row(outcome["name"], outcome["says"], as_it_is_ms, twin_ms, change, expected, best["median_ms"], ends, kept, mended)  # fmt: skip


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_ANSWERS = {None: "", True: "yes", False: "**no**"}


def page(outcomes: Sequence[dict[str, Any]]) -> str:
    """All of them as Markdown, misses included."""
    lines = [
        "| fault | as it is, ms | best change found | expected, ms | measured, ms (95 %) | without the fault, ms | mended | promise kept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = []
    for outcome in outcomes:
        found = row(outcome)
        if found is None:
            why = "; ".join(outcome["error"]) or "nothing was suggested that can be tried"
            lines.append(f"| {outcome['name']}: {outcome['says']} | | {why} | | | | no | |")
            continue
        rows.append(found)
        ends = (
            "" if found.interval_ms is None else f" ({found.interval_ms[0]:.1f}–{found.interval_ms[1]:.1f})"
        )
        expected = "" if found.expected_ms is None else f"{found.expected_ms:.1f}"
        kept, mended = _ANSWERS[found.kept], _ANSWERS[found.mended]
        lines.append(
            f"| {found.name}: {found.says} | {found.as_it_is_ms:.1f} | `{found.change}` | {expected} "
            f"| {found.measured_ms:.1f}{ends} | {found.twin_ms:.1f} | {mended} | {kept} |"
        )
    told = [found for found in rows if found.kept is not None]
    small = sum(found.mended is None for found in rows)
    lines += [
        "",
        f"{sum(bool(found.mended) for found in rows)} of {len(outcomes) - small} faults are mended by what was found (within "
        f"{NEAR:.0%} of the job without the fault); {sum(bool(found.kept) for found in told)} of {len(told)} promises are kept."
        + (f" {small} cost less than {NEAR:.0%} with nothing changed." if small else ""),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.tries", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="faults whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, required=True, metavar="DIR", help="folder of outcomes")
    parser.add_argument(
        "--write", type=Path, metavar="F", help="put the table into this page, between its two marks"
    )
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    for repair in REPAIRS:
        file = options.keep / f"{repair.name}.json"
        if options.only not in repair.name or file.exists():
            continue
        folder = Path(tempfile.mkdtemp(prefix="ddpdoctor-tries-"))
        outcome = measured(repair, folder, options.rounds)
        file.write_text(json.dumps(outcome, indent=1))
        print(page([outcome]), flush=True)
    files = [options.keep / f"{repair.name}.json" for repair in REPAIRS]
    text = page([json.loads(file.read_text()) for file in files if file.exists()])
    print(text)
    if options.write is not None:
        before, mark, rest = options.write.read_text().partition("<!-- figures -->\n")
        _, end, after = rest.partition("<!-- end of figures -->\n")
        options.write.write_text(f"{before}{mark}{text}{end}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
