"""The jobs that are run on a GPU, what must be said of each, and how each is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ports import free_port

REPOSITORY = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")


@dataclass(frozen=True)
class Scenario:
    """One job under ``ddpdoctor run``."""

    name: str
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Of ``ddpdoctor run``."""
    bare: bool = False
    """Without ddpdoctor."""
    timeout_s: float = 60.0
    rules: frozenset[str] = field(default_factory=frozenset)
    """One of these is among the findings; empty if nothing is expected."""
    compares_ranks: bool = False
    """Whether ``rules`` are found only if each rank has its own GPU; otherwise that ranks share one is."""
    environment: tuple[tuple[str, str], ...] = ()
    beside: tuple[tuple[str, ...], ...] = ()
    """Commands of ddpdoctor, of which the run directory is the last argument, that run one after another while the job trains."""
    settings: tuple[str, ...] = ()
    """The job runs under ``ddpdoctor try`` with these settings."""


def planted(name: str, *rules: str, **more: Any) -> Scenario:
    arguments = ("--fault", more.pop("fault", name), *more.pop("arguments", ()))
    return Scenario(name, arguments=arguments, rules=frozenset(rules), **more)


LONG = ("--steps", "400")
SHORT = ("--steps", "130")

SCENARIOS = (
    Scenario("bare-one", ranks=1, bare=True),
    Scenario("bare-one-again", ranks=1, bare=True),
    Scenario("one-without-window", ranks=1, options=("--no-profile",)),
    Scenario("bare-long", ranks=1, bare=True, arguments=LONG),
    Scenario("long", ranks=1, arguments=LONG),
    Scenario("long-attached", ranks=1, arguments=LONG, environment=(("TEARDOWN_CUPTI", "0"),)),
    Scenario("one", ranks=1),
    Scenario("bare", bare=True),
    Scenario("healthy"),
    planted(
        "late-device",
        *("rank-imbalance/slow-compute", "allreduce/late-rank", "rank-imbalance/uneven-work"),
        compares_ranks=True,
    ),
    planted("late-host", "rank-imbalance/host-work", "allreduce/late-rank", compares_ranks=True),
    planted("slow-data", "dataloader/starved"),
    planted("item", "host/python-work", ranks=1),
    planted("python", "host/python-work", ranks=1),
    planted("launch-bound", "gpu/launch-bound", ranks=1),
    planted("pageable", "dataloader/slow-copy", ranks=1),
    planted("checkpoint", "sync/checkpoint", "run/checkpoints", ranks=1),
    planted("barrier", "sync/explicit-barrier"),
    planted("float32", "gpu/no-tensor-cores", ranks=1),
    planted("small-buckets", "allreduce/small-buckets"),
    planted("gloo", "allreduce/gloo-on-gpu", arguments=("--backend", "gloo")),
    planted(
        "item-large",
        *("sync/device-sync", "host/python-work"),
        fault="item",
        ranks=1,
        arguments=("--batch", "1024", "--loop-ms", "7", "--steps", "200"),
    ),
    planted("compiled", ranks=1, arguments=SHORT),
    planted("graph", ranks=1, arguments=SHORT),
    planted("fsdp", arguments=SHORT),
    planted("leak", "memory/device-growing", ranks=1, arguments=("--steps", "1500")),
    planted("profiled", arguments=("--profile", "traces", *SHORT)),
    planted(
        "beside",
        fault="",
        arguments=("--steps", "1200"),
        ranks=1,
        beside=(("watch", "--once"), ("stacks",), ("capture", "--steps", "4"), ("capture", "--steps", "4")),
    ),
    planted("try", fault="slow-data", ranks=1, settings=("loader.num_workers=4",), timeout_s=100),
    planted(
        "killed",
        "hang/not-reached",
        fault="sleeps",
        options=("--hang-after", "10", "--on-hang", "kill"),
        timeout_s=90,
    ),
    planted("out-of-memory"),
    planted("device-error", "hang/device-error", "hang/rank-raised"),
    planted(
        "sleeps",
        "hang/not-reached",
        arguments=("--timeout", "25"),
        options=("--hang-after", "10"),
        timeout_s=72,
    ),
    planted(
        "other-collective",
        "hang/different-collectives",
        arguments=("--timeout", "25"),
        options=("--hang-after", "10"),
        timeout_s=72,
    ),
)


def run(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Run the job in ``folder``: its output, its own measure of itself (``truth``), and the run directory ``run``."""
    folder.mkdir(parents=True)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(scenario.ranks))
    job = [sys.executable, *(torchrun if scenario.ranks > 1 else ()), str(JOB)]
    job += ["--truth", str(folder / "truth"), *scenario.arguments]
    command = job
    ddpdoctor = (sys.executable, "-m", "ddpdoctor")
    if scenario.settings:
        settings = [word for setting in scenario.settings for word in ("--set", setting)]
        command = [*ddpdoctor, "try", *settings, "--json", str(folder / "try.json"), "--", *job]
    elif not scenario.bare:
        command = [*ddpdoctor, "run", "--out", str(folder / "run"), *scenario.options, "--", *job]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    environment["PYTHONPATH"] = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
    if scenario.ranks == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment.update(alone, MASTER_PORT=str(free_port()))
    environment.update(scenario.environment)
    began = time.monotonic()
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        for words in scenario.beside:
            run_beside(
                process, [*ddpdoctor, *words, str(folder / "run")], environment, folder, scenario.timeout_s
            )
        try:
            code = process.wait(scenario.timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                code = process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    found: dict[str, Any] = {
        "name": scenario.name,
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
    }

    found["truth"] = [json.loads(path.read_text()) for path in sorted(folder.glob("truth.*"))]
    if (folder / "run" / "diagnosis.json").exists():
        diagnosis = json.loads((folder / "run" / "diagnosis.json").read_text())
        found["findings"] = [
            [one["rule"], one["severity"], one["costs_ms_per_step"], one["ranks"]]
            for one in diagnosis["findings"]
        ]
    (folder / "found.json").write_text(json.dumps(found))
    return found


def run_beside(
    job: subprocess.Popen[bytes],
    command: list[str],
    environment: dict[str, str],
    folder: Path,
    limit_s: float,
) -> None:
    """Run the command as soon as the job trains, and add what it prints to ``beside.txt``. Neither takes longer than ``limit_s``."""
    logs, end_s = folder / "run" / "ranks", time.monotonic() + limit_s
    while job.poll() is None and not any(path.stat().st_size for path in logs.glob("*/steps.jsonl")):
        if time.monotonic() > end_s:
            return
        time.sleep(0.2)
    with open(folder / "beside.txt", "a") as output:
        print("$", *command[1:], file=output, flush=True)
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
            print("exit code", done.returncode, file=output)
        except subprocess.TimeoutExpired:
            print("timed out", file=output)
