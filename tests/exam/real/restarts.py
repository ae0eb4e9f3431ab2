"""Jobs that torchrun restarts, with random attempts (how each ends, on which rank and in which step) and checkpoints.

The job records its steps and failures, and this module observes when its processes end.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.exam.planted import Case, Fault

from .record import JOB_S, NOTHING, REPOSITORY, environment, recorded
from .record import RUN as RUN

JOB = REPOSITORY / "tests" / "jobs" / "restarting_ddp.py"
ENDS = ("code", "raise", "kill", "hang", "abort", "lock")
ALL = -1
"""Rank of an end on all ranks."""
EARLY = "early"
"""An end before the process group exists. Nothing is recorded of it."""
POLL_S = 0.02
RULES = ("run/restarts",)
Plan = dict[str, Any]


def drawn(seed: int) -> Plan:
    """The plan of ``seed``, in the format of the job. ``restarts``: number of restarts that torchrun may make."""
    draw = random.Random(f"exam restarts {seed}")
    steps, done, ends = draw.randrange(80, 200), 0, []
    every = draw.choice((0, *range(5, 50, 3), *range(5, 50, 3)))
    world = draw.choice((2, 2, 3))
    for number in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
        anywhere, after_saving = draw.randrange(done, steps), min(done + every, steps - 1)
        step = draw.choice((anywhere, anywhere, after_saving))
        how = draw.choice((*ENDS, EARLY) if number else ENDS)
        code = 0 if draw.random() < 0.2 else draw.randrange(2, 100)
        who = ALL if how == "raise" and draw.random() < 0.3 else draw.randrange(world)
        ends.append({"step": step, "rank": who, "how": how, "code": code})
        if how != EARLY:
            done = step - step % every if every else 0
    spare = draw.choice((-1, 0, 0, 1)) if ends and ends[-1]["how"] != EARLY else draw.randrange(3)
    plan = {"steps": steps, "every": every, "step_ms": draw.uniform(8, 20), "timeout_s": draw.randrange(4, 8)}
    return {**plan, "world": world, "ends": ends, "restarts": len(ends) + spare}


def record(seed: int, folder: Path) -> Case:
    """Run the job of ``seed``. Writes its run directory and ground truth to ``folder``."""
    if folder.exists():
        shutil.rmtree(folder)
    plan = drawn(seed)
    code, gone_ns = run(plan, folder)
    case = truth(seed, plan, folder / "job", code, gone_ns)
    case.write(folder)
    return case


def torchrun(plan: Plan, job: Path, *options: str) -> list[str]:
    """The command that starts the job. Its files are in the folder ``job``."""
    start = [sys.executable, "-m", "torch.distributed.run", *(options or ("--standalone",))]
    return [
        *start,
        "--nproc-per-node",
        str(plan["world"]),
        "--max-restarts",
        str(plan["restarts"]),
        str(JOB),
        str(job),
    ]


def prepare(plan: Plan, job: Path) -> None:
    """Make the folder of the job's files and write its plan."""
    job.mkdir(parents=True, exist_ok=True)
    (job / "plan.json").write_text(json.dumps(plan))


def run(
    plan: Plan, folder: Path, options: Sequence[str] = (), variables: Mapping[str, str] = NOTHING
) -> tuple[int, dict[int, int]]:
    """Run the job under ``ddpdoctor run`` with these options. Returns (exit code, end of each rank's process in epoch ns by pid)."""
    job = folder / "job"
    prepare(plan, job)
    command = recorded(folder, torchrun(plan, job), ["--no-profile", *options])
    # Without it, a second attempt sometimes reads the first one's addresses in torch 2.13, with or without ddpdoctor.
    variables = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
    with (job / "output.txt").open("ab") as output:
        process = subprocess.Popen(command, cwd=job, env=variables, stdout=output, stderr=output)
        try:
            gone_ns = _ends_of_ranks(process, job)
        finally:
            process.kill()
            process.wait()
    return process.returncode, gone_ns


def _ends_of_ranks(process: subprocess.Popen[bytes], job: Path) -> dict[int, int]:
    pids: set[int] = set()
    gone_ns: dict[int, int] = {}
    until_s = time.monotonic() + JOB_S
    while process.poll() is None:
        if time.monotonic() > until_s:
            raise TimeoutError(f"the job did not end within {JOB_S} s, see {job}/output.txt")
        pids.update(each["pid"] for each in records(job) if each["what"] == "started")
        gone_ns |= {pid: time.time_ns() for pid in pids - gone_ns.keys() if not _runs(pid)}
        time.sleep(POLL_S)
    return gone_ns | {pid: time.time_ns() for pid in pids - gone_ns.keys()}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def records(job: Path) -> list[dict[str, Any]]:
    """The records of all ranks, with ``rank``, sorted by time."""
    found = [
        {"rank": int(file.stem.partition("-")[2]), **json.loads(line)}
        for file in job.glob("truth-*.jsonl")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return sorted(found, key=lambda each: each["at_ns"])


def attempts_of(job: Path, gone_ns: Mapping[int, int]) -> list[dict[str, Any]]:
    """The attempts with a process group, from the job's records: steps from ``first`` to ``done``, the end that ``failed`` it, the
    number of attempts without a process group ``before`` it, and times in epoch ns."""
    found: list[dict[str, Any]] = []
    early = 0
    for each in records(job):
        if each["what"] == "started":
            if each["attempt"] == len(found):
                begun = {"first": each["done"], "done": each["done"], "steps_ns": {}, "pids": []}
                found.append({**begun, "before": early})
                early = 0
            found[-1]["pids"].append(each["pid"])
        elif each["what"] == "step":
            found[-1]["done"] = max(found[-1]["done"], each["done"])
            found[-1]["steps_ns"].setdefault(each["done"], []).append(each["at_ns"])
        elif each.get("how") == EARLY:
            early += 1
        elif each["what"] == "failed":
            end = {"ranks": [], **{name: each[name] for name in ("how", "code", "at_ns")}}
            found[-1].setdefault("failed", end)["ranks"].append(each["rank"])
    for each in found:
        each["gone_ns"] = max(gone_ns[pid] for pid in each.pop("pids"))
    return found


def truth(seed: int, plan: Plan, job: Path, code: int, gone_ns: Mapping[int, int]) -> Case:
    """The ground truth; ``shape`` has the attempts of the job and the costs of its restarts."""
    attempts = attempts_of(job, gone_ns)
    if not attempts:
        raise RuntimeError(f"no attempt began, see {job}/output.txt")
    costs = {"repeated_steps": 0, "repeated_s": 0.0, "detection_s": 0.0, "start_s": 0.0}
    for old, new in pairwise(attempts):
        ends_ns = [max(each) for done, each in sorted(old["steps_ns"].items()) if done >= new["first"]]
        costs["repeated_steps"] += old["done"] - new["first"]
        costs["repeated_s"] += (max(ends_ns, default=0) - min(ends_ns, default=0)) / 1e9
        costs["detection_s"] += (old["gone_ns"] - old["failed"]["at_ns"]) / 1e9
        first_ns = max(new["steps_ns"].get(new["first"] + 1, [new["gone_ns"]]))
        costs["start_s"] += (first_ns - old["gone_ns"]) / 1e9
    ends = [each.get("failed", {}) for each in attempts]
    shape = {
        "attempts": len(attempts),
        "restarts": len(attempts) - 1 + sum(each["before"] for each in attempts),
        "ends": ends,
        "exit": code,
        "every": plan["every"],
        "costs": costs,
    }
    faults = tuple(Fault(each["how"], RULES, tuple(each["ranks"]), 0.0) for each in ends[:-1])
    return Case(seed, "restarts", plan["step_ms"], faults, shape=shape)
