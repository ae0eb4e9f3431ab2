"""What a data loader's workers do is recorded in the workers, and says at which line a starved loop waits."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.hook.environment import HookOptions
from ddpdoctor.hook.profiling import WorkerRecorder
from ddpdoctor.rundir import WORKERS_FILE
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.spool import Spool, accept_workers, make_spool_root
from tests.python import NEEDS_STACKS

from .recording import JOBS, Recorded, forked, run_recorded, torchrun

pytestmark = [pytest.mark.torchrun]

TEXT = (JOBS / "loader_workers.py").read_text().splitlines()
NO_WINDOW = HookOptions(profile_steps=None)

BATCH_BYTES = 2 * 16 * 4
"""Two items of ``loader_workers.WIDTH`` floats."""


def recorded(tmp: Path, *arguments: str, ranks: int = 2) -> Recorded:
    run = run_recorded(tmp, forked("loader_workers.py", *arguments, ranks=ranks), NO_WINDOW)
    assert run.process.returncode == 0, run.process.stderr
    assert "ddpdoctor" not in run.process.stderr
    return run


def loader_facts(run: Recorded) -> dict:
    """The facts of the loader, and not the findings: these depend on what else the machine does."""
    return analyze([str(run.run)]).facts["loader"]


def worker_lines(run: Recorded, rank: int) -> list[dict]:
    return [json.loads(line) for line in (run.folder(rank) / "workers.jsonl").read_text().splitlines()]


def code_of(where: dict) -> str:
    assert where["file"] == str(JOBS / "loader_workers.py")
    return TEXT[where["line"] - 1].strip()


@pytest.fixture(scope="module")
def sleeping(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded(tmp_path_factory.mktemp("sleeping"), "--slow-ms", "15")


@NEEDS_STACKS
def test_the_line_in_the_workers(sleeping: Recorded):
    facts = loader_facts(sleeping)
    line = facts["worker_where"][0]
    assert code_of(line) == "time.sleep(seconds)" and line["share"] > 0.8
    assert line["process"] == f"workers of rank {facts['workers_rank']}"
    assert [caller["function"] for caller in line["callers"]] == ["Slow.__call__", "Items.__getitem__"]
    assert facts["batch_ms"] > 30 and facts["computing_share"] < 0.5
    assert facts["batch_bytes"] == BATCH_BYTES


def test_what_workers_did(sleeping: Recorded):
    for rank in (0, 1):
        lines = worker_lines(sleeping, rank)
        (loader,) = [line for line in lines if "loader" in line]
        assert loader["loader"] == 0 and len(loader["pids"]) == 2
        worked = [line for line in lines if "worker" in line]
        assert {line["worker"] for line in worked} == {0, 1} and {line["of"] for line in worked} == {2}
        assert {line["pid"] for line in worked} == set(loader["pids"])
        # All but the first of each.
        assert sum(line["n"] for line in worked) == 80 - 2
        assert sum(line["d"] for line in worked) >= 78 * 2 * 15_000_000
        assert sum(line["b"] for line in worked) == 78 * BATCH_BYTES
        assert sum(line["cpu"] for line in worked) < 0.3 * sum(line["d"] for line in worked)


@pytest.mark.extended
@NEEDS_STACKS
@pytest.mark.parametrize(
    ("at", "how", "function"),
    [
        ("collate", "python", "Collate.__call__"),
        ("stream", "numpy", "Stream.__iter__"),
        ("transform", "sleep", "Transform.__call__"),
    ],
)
def test_wherever_they_are_slow(tmp_path, at: str, how: str, function: str):
    run = recorded(tmp_path, "--at", at, "--how", how, "--slow-ms", "25", "--slow-rank", "1")
    where = loader_facts(run)["worker_where"][0]
    assert where["process"] == "workers of rank 1"
    assert function in [caller["function"] for caller in where["callers"]]
    assert (
        where["function"].partition(".")[0]
        == {"sleep": "sleeps", "python": "computes", "numpy": "multiplies"}[how]
    )


@pytest.mark.extended
@NEEDS_STACKS
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_spawned(tmp_path, context: str):
    run = run_recorded(
        tmp_path, torchrun("loader_workers.py", "--context", context, "--slow-ms", "15"), NO_WINDOW
    )
    assert run.process.returncode == 0, run.process.stderr
    assert code_of(loader_facts(run)["worker_where"][0]) == "time.sleep(seconds)"


@pytest.mark.extended
@NEEDS_STACKS
def test_one_slow_worker_among_four(tmp_path):
    run = recorded(
        tmp_path,
        "--workers",
        "4",
        "--slow-worker",
        "3",
        "--slow-ms",
        "60",
        "--slow-rank",
        "1",
        "--steps",
        "120",
    )
    facts = loader_facts(run)
    assert facts["slow_worker"] == 3 and facts["slow_worker_ms"] > 100 > 10 * facts["other_workers_ms"]
    assert facts["worker_where"][0]["process"] == "worker 3 of rank 1"
    assert code_of(facts["worker_where"][0]) == "time.sleep(seconds)"


@pytest.mark.extended
@NEEDS_STACKS
def test_workers_made_anew_for_each_pass(tmp_path):
    run = recorded(tmp_path, "--epochs", "4", "--steps", "24", "--slow-ms", "15")
    lines = worker_lines(run, 0)
    assert len([line for line in lines if "loader" in line]) == 4
    assert len({line["pid"] for line in lines if "worker" in line}) == 8
    assert code_of(loader_facts(run)["worker_where"][0]) == "time.sleep(seconds)"


@pytest.mark.extended
def test_healthy_workers_are_no_finding(tmp_path):
    run = recorded(tmp_path, "--slow-ms", "0", "--step-ms", "15", "--workers", "1")
    diagnosis = analyze([str(run.run)])
    assert [finding.rule for finding in diagnosis.findings if finding.rule.startswith("dataloader/")] == []
    assert diagnosis.facts["loader"]["slow_worker"] is None
    assert diagnosis.facts["loader"]["workers_busy_share"] < 0.5


def threads_of_workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ddpdoctor-worker"]


def test_nothing_is_started_where_the_parent_is_not_recorded(tmp_path):
    os.chmod(tmp_path, 0o700)
    recorder = WorkerRecorder(str(tmp_path), [])
    for _ in range(3):
        recorder.after(recorder.before((), {}), None)
    recorder.finish()
    assert threads_of_workers() == []


def _works_and_forks(root: str, batches: int) -> None:
    """A worker; a process that it forks leaves the worker's loop too, as a process does by sys.exit()."""
    recorder = WorkerRecorder(root, [])
    for _ in range(batches):
        recorder.after(recorder.before((), {}), None)
    forked_pid = os.fork()
    if forked_pid == 0:
        recorder.finish()
        os._exit(0)
    os.waitpid(forked_pid, 0)
    recorder.finish()


def test_a_process_that_a_worker_forks_is_no_worker(tmp_path):
    spool = Spool(make_spool_root(str(tmp_path)), 0, str(tmp_path))
    try:
        accept_workers(spool)
        worker = multiprocessing.get_context("fork").Process(
            target=_works_and_forks, args=(os.path.dirname(spool.directory), 5)
        )
        worker.start()
        worker.join(30)
        lines = (Path(drain(spool.directory)) / WORKERS_FILE).read_text().splitlines()
    finally:
        spool.close()
        drain(spool.directory, remove=True)
    worked = [line for line in map(json.loads, lines) if "worker" in line]
    assert [(line["pid"], line["n"]) for line in worked] == [(worker.pid, 4)]
