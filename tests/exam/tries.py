"""``python -m tests.exam.tries``: what `try --all` finds for jobs with a fault, against the same jobs without it.

Each job is recorded with its fault, what its findings suggest is tried, and the job without the fault is measured like a trial
before and after. Nobody chooses a change by hand. Outcomes are kept in a folder, one file each, and only what is not there yet is run;
``--write`` makes the page of all that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddpdoctor.experiment import Command, own_command, run_trial

from .real.draw import Program, program
from .real.kinds import PACED, Asked
from .real.record import RUN, environment, run

STEPS = 150
"""Steps of each trial: some seconds, as `try` itself uses for steps of this length."""
STEPS_OF_JOB = 240
TOLERANCE = 0.10
"""A job that is slower than the job without the fault by at most this share counts as fixed."""
FAULT = "fault"
_AMOUNT = f'amount("{FAULT}")'
_SLEEP = {"item": f"time.sleep({_AMOUNT})\n"}
_BUFFERS = f"""\
for n in range(150 if {_AMOUNT} else 0):
    self.register_buffer(f"mean{{n}}", torch.zeros(1 << 12))
"""
_BETWEEN = f"""\
if {_AMOUNT}:
    dist.barrier()
time.sleep(0.02 if rank == 1 else 0.0)
"""


@dataclass(frozen=True)
class Repair:
    """A fault that a setting may fix."""

    name: str
    says: str
    job: Asked
    amount: float = 1.0
    """Size of the fault; 0 in the job without it."""
    rank: int | None = None
    """The rank with the fault; None: all."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job with the fault."""
    bounds: bool = False
    """Whether no setting fixes the fault, so that the simulated upper bound of a fix is measured."""


def _job(places: Mapping[str, str], kind: str = "", **shape: object) -> Asked:
    of_all = {**PACED, "step_ms": 15.0, "settings": ""}
    return Asked(kind, {**of_all, **shape}, places)


REPAIRS = (
    Repair("data-all", "all ranks' samples wait 4 ms each for storage, no workers", _job(_SLEEP), 0.004),
    Repair("data-one", "one rank's samples wait 4 ms each, no workers", _job(_SLEEP), 0.004, rank=1),
    Repair("data-worker", "samples wait 5 ms each, one worker", _job(_SLEEP, workers=1, step_ms=20.0), 0.005),
    Repair(
        "worker-start", "workers start anew in each short epoch, which takes 150 ms",
        _job({}, "worker-start", structure="nested", workers=1, epochs=8, step_ms=20.0), 0.15,
    ),
    Repair("tiny-buckets", "buckets of 10 kB", _job({}, "buckets", width=64, depth=60)),
    Repair("no-no-sync", "four micro-batches, gradients reduced in each", _job({}, "resync", parts=4, width=900, depth=2)),
    Repair(
        "unused", "find_unused_parameters=True, and none is unused",
        _job({"settings": f", find_unused_parameters=bool({_AMOUNT})"}, width=16, depth=300, step_ms=5.0),
    ),
    Repair(
        "buffers", "150 buffers broadcast before each forward",
        _job({"modules": _BUFFERS, "imports": "from switch import amount\n"}, step_ms=5.0),
    ),
    Repair(
        "threads", "as many threads in each rank as would fill the machine thrice",
        _job({}, width=1200, depth=4, batch=64, step_ms=5.0),
        variables={"OMP_NUM_THREADS": str(3 * (os.cpu_count() or 1))},
    ),
    Repair(
        "barrier", "a barrier between forward and backward keeps uneven ranks from evening out",
        _job({"before": "time.sleep(0.02 if rank == 0 else 0.0)\n", "middle": _BETWEEN}),
        bounds=True,
    ),
)  # fmt: skip


def write_job(repair: Repair, folder: Path) -> Program:
    """Write the job to ``folder / "job"``, and the same job without the fault to ``folder / "twin"``."""
    drawn = program(1, folder / "job", repair.job)
    shutil.copytree(folder / "job", folder / "twin")
    ranks = None if repair.rank is None else [repair.rank]
    fault = {repair.job.kind or FAULT: {"ranks": ranks, "amount": repair.amount, "every": 1}}
    for name, extras in (("job", fault), ("twin", {})):
        plan = {"extras": extras, "steps": STEPS_OF_JOB}
        (folder / name / "plan.json").write_text(json.dumps(plan))
    return drawn


def measure(repair: Repair, folder: Path, rounds: int) -> dict[str, Any]:
    """Record the job of ``repair`` and try the changes that its findings suggest."""
    drawn = write_job(repair, folder)
    run(drawn, folder, variables=repair.variables)
    before = _twin_ms(drawn.command(folder / "twin"))
    tried = [*own_command(), "try", str(folder / RUN), "--all", "--rounds", str(rounds)]
    tried += [*(["--bounds"] if repair.bounds else []), "--steps", str(STEPS), "--json", str(folder / "trials.json")]  # fmt: skip
    done = subprocess.run(
        [*tried, "--", *drawn.command(folder / "job")],
        env={**environment(), **repair.variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    after = _twin_ms(drawn.command(folder / "twin"))
    answer = json.loads((folder / "trials.json").read_text()) if done.returncode == 0 else None
    return {"name": repair.name, "says": repair.says, "twin_ms": [before, after], "answer": answer,
            "error": done.stderr.strip().splitlines()[-1:] if answer is None else []}  # fmt: skip


def _twin_ms(words: Sequence[str]) -> dict[str, float]:
    """Median and mean step time of the job without the fault, measured like a trial."""
    trial = run_trial(Command(words, environment()), {}, STEPS, 240.0)
    if trial.why:
        raise RuntimeError(trial.why)
    return {"median": float(np.median(trial.step_ms)), "mean": float(np.mean(trial.step_ms))}


@dataclass(frozen=True)
class Row:
    """The result of one repair."""

    name: str
    says: str
    as_it_is_ms: float
    twin_ms: float
    change: str
    expected_ms: float | None
    measured_ms: float
    interval_ms: Sequence[float] | None
    kept: bool | None
    fixed: bool | None
    """None if the fault costs so little that the job with it would count as fixed."""


def row(outcome: dict[str, Any]) -> Row | None:
    """The result of ``outcome``; None if no change was measured."""
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
    # Absolute times, because a ratio to the unchanged job would include the variation of its trials, which the twin does not have.
    near_ms = (1 + TOLERANCE) * twin_ms
    fixed = statistics.mean(best["trials_ms"]) <= near_ms if as_it_is_ms > near_ms else None
    return Row(outcome["name"], outcome["says"], as_it_is_ms, twin_ms, change, expected, best["median_ms"], ends, kept, fixed)  # fmt: skip


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_ANSWERS = {None: "", True: "yes", False: "**no**"}


def page(outcomes: Sequence[dict[str, Any]]) -> str:
    """All outcomes as Markdown, including misses."""
    lines = [
        "| fault | unchanged, ms | best change found | expected, ms | measured, ms (95 %) | without fault, ms | fixed | prediction right |",
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
        kept, fixed = _ANSWERS[found.kept], _ANSWERS[found.fixed]
        lines.append(
            f"| {found.name}: {found.says} | {found.as_it_is_ms:.1f} | `{found.change}` | {expected} "
            f"| {found.measured_ms:.1f}{ends} | {found.twin_ms:.1f} | {fixed} | {kept} |"
        )
    known = [found for found in rows if found.kept is not None]
    small = sum(found.fixed is None for found in rows)
    lines += [
        "",
        f"{sum(bool(found.fixed) for found in rows)} of {len(outcomes) - small} faults are fixed by what was found (within "
        f"{TOLERANCE:.0%} of the job without the fault); {sum(bool(found.kept) for found in known)} of {len(known)} predictions are right."
        + (f" {small} cost less than {TOLERANCE:.0%} with nothing changed." if small else ""),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exam.tries", description=__doc__)
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
        outcome = measure(repair, folder, options.rounds)
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
