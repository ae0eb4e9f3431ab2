"""Several hosts, and several launchers on one: schedulers that start a launcher per rank, and two hosts that are real
but for sharing a machine (network, host name, processes and memory-backed storage of their own).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.live import free_port
from tests.cli.live import metrics as metrics_at
from tests.hook.recording import JOBS, Recorded, forked
from tests.waiting import until

from .launched import (
    DDPDOCTOR_RUN,
    TINY,
    clean_environment,
    program_of,
    python_with,
    steps_taken,
    two_ranks_took,
)
from .two_hosts import two_hosts, why_not

pytestmark = [pytest.mark.torchrun, pytest.mark.extended]


@contextlib.contextmanager
def started(commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> Iterator[list]:
    """All commands at once; ended with the block, whatever happens."""
    processes = [
        subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def finish(processes: list) -> list[subprocess.CompletedProcess[str]]:
    """Each with what it wrote."""
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=180)
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return ended


def one_sampler(run: Path, host: str) -> None:
    """One launcher of this host sampled it, from beginning to end."""
    lines = [json.loads(line) for line in (run / "hosts" / host / "telemetry.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "schema" in line]) == 1
    assert len([line for line in lines if line.get("closed")]) == 1


def test_one_launcher_per_rank_under_slurm(tmp_path) -> None:
    shared = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    environments = [
        clean_environment(**shared, SLURM_PROCID=str(task), SLURM_LOCALID=str(task)) for task in (0, 1)
    ]
    command = [*DDPDOCTOR_RUN, "--", sys.executable, TINY, "--store", str(tmp_path / "store")]
    with started([command] * 2, environments, tmp_path) as processes:
        ended = finish(processes)
    assert [process.returncode for process in ended] == [0, 0], ended
    run = tmp_path / "ddpdoctor-runs" / "slurm-77.0-tiny_ddp"
    recorded = Recorded(ended[0], run)
    two_ranks_took(recorded, 6)
    assert [recorded.info(rank)["local_rank"] for rank in (0, 1)] == [0, 1]
    assert {recorded.info(rank)["job_id"] for rank in (0, 1)} == {"77.0"}
    one_sampler(run, socket.gethostname())
    assert sum("recorded in" in process.stderr for process in ended) == 1


def test_another_launcher_samples_the_host_once_the_first_has_ended(tmp_path) -> None:
    launcher = [*DDPDOCTOR_RUN, "--out", "run", "--no-profile", "--telemetry-interval", "0.2"]
    port = free_port()
    metrics = [*launcher, "--prometheus", str(port)]
    telemetry = tmp_path / "run" / "hosts" / socket.gethostname() / "telemetry.jsonl"
    with started([[*metrics, "--", "sleep", "4"]], [clean_environment()], tmp_path) as first:
        until(lambda: telemetry.exists() and b'"ranks"' in telemetry.read_bytes())
        job = forked(TINY, "--steps", "120", "--step-ms", "100", ranks=1)
        with started([[*metrics, "--", *job]], [clean_environment()], tmp_path) as second:
            (sleeper,) = finish(first)
            ended_ns = time.time_ns()
            assert "telemetry" not in sleeper.stderr.lower(), sleeper.stderr
            until(lambda: "ddpdoctor_steps_total" in metrics_at(port), within_s=20)
            (trainer,) = finish(second)
    assert (trainer.returncode, "cannot be served on" in trainer.stderr) == (0, False), trainer.stderr
    samples = [json.loads(line) for line in telemetry.read_text().splitlines()]
    later = [each for each in samples if each.get("ranks") and each["t_ns"] > ended_ns]
    assert len(later) > 5 and all("0" in each["ranks"] for each in later[:3])


def test_one_launcher_per_rank_ends_the_rank_that_others_wait_for(tmp_path) -> None:
    """Whichever of them watches."""
    of_job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [clean_environment(**of_job, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    options = ["--out", "run", "--no-profile", "--hang-after", "3", "--on-hang", "kill"]
    job = [sys.executable, str(JOBS / "stopping_ddp.py"), "--how", "asleep_in_a_lock", "--for-s", "100"]
    with started([[*DDPDOCTOR_RUN, *options, "--", *job]] * 2, environments, tmp_path) as processes:
        ended = finish(processes)
    told = "".join(process.stderr for process in ended)
    assert [process.returncode for process in ended] != [0, 0] and "Traceback" not in ended[1].stderr, told
    assert told.count("the job is ended, as --on-hang kill asks") == 2
    assert told.count("another launcher of this host has found that all of its ranks hang") == 1
    ends = json.loads((tmp_path / "run" / "hosts" / socket.gethostname() / "ends.json").read_text())["ends"]
    assert {end["rank"]: end["signal"] for end in ends}[1] == 15


def test_who_takes_over_the_watch_knows_how_ranks_ended_before_it(tmp_path) -> None:
    """The launcher that watches is stopped before a rank of another one dies, and killed after that."""
    of_job = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    rank = [sys.executable, str(JOBS / "stopping_ddp.py"), "--how", "killed", "--rank", "0"]
    job = ["sh", "-c", '"$@"; touch gone; sleep 3', "sh", *rank]
    launcher = [*DDPDOCTOR_RUN, "--out", "run", "--no-profile", "--"]
    environment = clean_environment(**of_job, MASTER_PORT=str(free_port()))
    ends = tmp_path / "run" / "hosts" / socket.gethostname() / "ends.json"
    with started([[*launcher, "sh", "-c", "touch began; sleep 300"]], [environment], tmp_path) as (first,):
        until(lambda: (tmp_path / "began").exists())
        watching = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
        with started([[*launcher, *job]], [environment], tmp_path) as second:
            for process in watching:
                process.suspend()
            until(lambda: (tmp_path / "gone").exists(), within_s=60)
            assert not ends.exists()
            for process in watching:
                process.kill()
            finish(second)
    (end,) = json.loads(ends.read_text())["ends"]
    assert (end["rank"], end["code"], end["signal"]) == (0, None, 9)


def test_a_hang_is_reported_soon_after_the_launcher_that_watched_was_killed(tmp_path) -> None:
    """Its hang monitor lives on until its rank is gone, and what it says reaches nobody."""
    of_job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [clean_environment(**of_job, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    job = [sys.executable, str(JOBS / "stopping_ddp.py"), "--how", "asleep_in_a_lock", "--for-s", "40"]
    command = [*DDPDOCTOR_RUN, "--out", "run", "--no-profile", "--hang-after", "10", "--", *job]
    with started([command], environments[:1], tmp_path) as (first,):
        until(lambda: list((tmp_path / "run").glob("hosts/*/telemetry.jsonl")), within_s=60)
        with started([command], environments[1:], tmp_path) as (second,):
            until(lambda: steps_taken(tmp_path / "run") >= 25, within_s=90)
            first.kill()
            killed_s = time.monotonic()
            told = next(line for line in second.stderr if "the job seems to hang" in line)
            assert time.monotonic() - killed_s < 45, told


def ranks_of_mpi(mpiexec: str, folder: Path) -> None:
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    options = (
        ["--allow-run-as-root", "--oversubscribe"] if "OpenRTE" in version or "Open MPI" in version else []
    )
    command = [*DDPDOCTOR_RUN, "--", sys.executable, TINY, "--store", str(folder / "store")]
    with started([[mpiexec, *options, "-n", "2", *command]], [clean_environment()], folder) as processes:
        (ended,) = finish(processes)
    assert ended.returncode == 0, ended.stderr
    (run,) = (folder / "ddpdoctor-runs").iterdir()
    recorded = Recorded(ended, run)
    two_ranks_took(recorded, 6)
    assert [recorded.info(rank)["local_rank"] for rank in (0, 1)] == [0, 1]
    one_sampler(run, socket.gethostname())


@pytest.mark.skipif(not shutil.which("mpiexec"), reason="no mpiexec here")
def test_mpiexec(tmp_path) -> None:
    ranks_of_mpi(str(shutil.which("mpiexec")), tmp_path)


def test_mpiexec_of_mpich(tmp_path) -> None:
    """From the package ``mpich``, where an interpreter has it."""
    ranks_of_mpi(str(program_of(python_with(program="mpiexec.hydra"), "mpiexec.hydra")), tmp_path)


PREPARES_ALONE = """
import os, sys, time
import torch
import torch.distributed as dist

def prepare():
    # Rank 0 prepares a data set, in a way of which nothing is to be seen.
    if os.environ["RANK"] == "0":
        time.sleep(15)
        open("prepared", "w").close()

if sys.argv[1] == "before it joins":
    prepare()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    if step == 10 and sys.argv[1] == "in a step":
        prepare()
        while not os.path.exists("prepared"):
            time.sleep(1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}")
@pytest.mark.parametrize("when", ["before it joins", "in a step"])
def test_a_host_that_waits_for_another_one_at_work_is_not_ended(tmp_path, when: str) -> None:
    """In init_process_group, or for a file."""
    (tmp_path / "train.py").write_text(PREPARES_ALONE)
    options = ["--no-profile", "--hang-after", "3"]
    with two_hosts() as hosts:
        commands, environments = [], []
        for node, on_hang in enumerate(("report", "kill")):
            launcher = [*DDPDOCTOR_RUN, "--out", f"run{node}", *options, "--on-hang", on_hang]
            commands.append(hosts.on(node, [*launcher, "--", *hosts.torchrun(node), "train.py", when]))
            environments.append(clean_environment(GLOO_SOCKET_IFNAME=hosts.names[node]))
        with started(commands, environments, tmp_path) as processes:
            ended = finish(processes)
    told = ended[1].stderr
    assert [process.returncode for process in ended] == [0, 0], ended
    assert "no rank of this host has" in told and "or ranks of other hosts work." in told
    assert "the job is not ended: " in told and "the job goes on, after" in told


@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}")
@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.slow), False])
def test_two_hosts(tmp_path, shared: bool) -> None:
    folders = ["run", "run"] if shared else ["first", "second"]
    with two_hosts() as hosts:
        commands, environments = [], []
        for node, folder in enumerate(folders):
            command = [*DDPDOCTOR_RUN, "--out", folder, "--", *hosts.torchrun(node), TINY, "--steps", "30"]
            commands.append(hosts.on(node, command))
            environments.append(clean_environment(GLOO_SOCKET_IFNAME=hosts.names[node]))
        with started(commands, environments, tmp_path) as processes:
            ended = finish(processes)
    assert [process.returncode for process in ended] == [0, 0], ended
    for rank, folder in enumerate(folders):
        recorded = Recorded(ended[rank], tmp_path / folder)
        assert len(recorded.steps(rank)) == 30
        assert recorded.info(rank)["host"] == hosts.names[rank]
        one_sampler(tmp_path / folder, hosts.names[rank])
    analyze = [*DDPDOCTOR_RUN[:3], "analyze", *sorted(set(folders)), "--json", "diagnosis.json"]
    subprocess.run(
        analyze, cwd=tmp_path, env=clean_environment(), check=True, capture_output=True, timeout=120
    )
    job = json.loads((tmp_path / "diagnosis.json").read_text())["job"]
    assert job["world_size"] == 2 and sorted(job["hosts"]) == sorted(hosts.names)
    assert job["ranks_seen"] == [0, 1], job
