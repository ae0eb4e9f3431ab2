"""``ddpdoctor watch``, and the metrics of ``ddpdoctor run --prometheus``, on a running job."""

import fcntl
import json
import os
import pty
import re
import resource
import shutil
import socket
import subprocess
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ddpdoctor.cli.watch_loop import WatchedRun, watch
from ddpdoctor.rundir.liveness import boot_id, pid_namespace
from tests.cli.live import DOCTOR, ENVIRONMENT, TRAINED, free_port, live_run, metrics
from tests.commands import command
from tests.hook.recording import forked
from tests.stall.recorded import LOCKED, REDUCING, TRAIN, WAITING, Stopped
from tests.waiting import until

ROOT = Path(__file__).parents[2]
RUN = ROOT / "fixtures" / "slow-data-one-rank"


def doctor(*arguments):
    done = command(*arguments, environment=ENVIRONMENT)
    return done.returncode, done.stdout, done.stderr


def test_a_finished_run_is_shown_once():
    code, out, err = doctor("watch", RUN)
    assert (code, err) == (0, "")
    assert "ended after" in out and "exit code 0" in out
    assert out.count("Rank 1 waits") == 1 and "verdict so far" not in out
    assert re.search(r"2 ranks · 100 steps done · [\d.]+ ms per step · \d+ samples/s", out)
    assert re.search(r"^run: \d+ s = start \d+ s \+ .*goodput +\d+ %", out, re.MULTILINE | re.DOTALL)
    assert re.search(r"^ +1 +99 +[\d.]+ ms +[\d.]+ ms +[\d.]+ ms", out, re.MULTILINE)


def test_once_shows_the_state_after_the_analysis(tmp_path, monkeypatch, capsys):
    run = shutil.copytree(RUN, tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text()) | {"host": "elsewhere", "ended_ns": None}
    (run / "manifest.json").write_text(json.dumps(manifest))
    recorded = {file: file.read_text() for file in run.glob("ranks/*/steps.jsonl")}
    for file, text in recorded.items():
        file.write_text("".join(text.splitlines(keepends=True)[: text.count("\n") // 2]))

    def think(watched):
        for file, text in recorded.items():
            file.write_text(text)

    monkeypatch.setattr(WatchedRun, "analyze", think)
    watch(run, 1.0, once=True)
    assert "2 ranks · 100 steps done" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_run_directory_is_one_sentence(tmp_path, name):
    (tmp_path / "empty").mkdir()
    code, out, err = doctor("watch", tmp_path / name)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"{name} is not a ddpdoctor run directory" in err


def test_a_run_without_steps_yet_and_one_whose_launcher_was_killed(tmp_path):
    manifest = {"schema": "ddpdoctor.run/1", "host": "elsewhere", "pid": 1, "started_ns": time.time_ns()}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = doctor("watch", tmp_path, "--once")
    assert code == 0 and "running for" in out and "no rank has recorded a step" in out
    ended = subprocess.Popen(["true"])
    ended.wait()
    manifest |= {"host": socket.gethostname(), "pid": ended.pid}
    manifest |= {"boot": boot_id(), "pid_namespace": 1}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = doctor("watch", tmp_path, "--once")
    assert code == 0 and "running for" in out, "a process id of another container says nothing"
    manifest |= {"pid_namespace": pid_namespace()}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = doctor("watch", tmp_path)
    assert code == 0 and "its launcher was killed" in " ".join(out.split())


def test_a_job_killed_while_it_hung_is_over(tmp_path):
    run = Stopped(tmp_path / "run", ended=False).launched_here()
    run.rank(0, "backward", REDUCING).rank(1, "other", LOCKED)
    run.seen(0, WAITING, waits=True).seen(1, WAITING, waits=False).stall("lasts")
    code, out, _ = doctor("watch", run.path)
    assert code == 0 and "its launcher was killed, its ranks have ended" in " ".join(out.split())
    assert "The job hung for 310 s until it was killed" in " ".join(out.split())
    assert "no rank has finished a step" not in out and "verdict so far" not in out
    assert [line.split()[-1] for line in out.splitlines() if re.match(r" +[01]  ", line)] == ["ended"] * 2


def test_the_line_of_a_finished_step_is_not_shown(tmp_path, monkeypatch, capsys):
    run = Stopped(tmp_path / "run", ended=False)  # on another host
    for log in run.path.glob("ranks/*/steps.jsonl"):
        log.write_text("".join(line for line in log.open() if not line.startswith('{"end"')))
    run.rank(0, "backward", REDUCING).rank(1, "collective", [[TRAIN, 24, "main"]], "progress", step=0)
    run.seen(0, WAITING, waits=True).seen(1, WAITING, answered=False).stall("lasts")
    said = json.loads((run.path / "ranks/00001/progress.json").read_text())
    present = [SimpleNamespace(rank=1, progress=said, spool="/nowhere")]
    monkeypatch.setattr("ddpdoctor.cli.watch_loop.present_ranks", lambda path: present)
    monkeypatch.setattr(WatchedRun, "analyze", lambda watched: None)
    watch(run.path, 1.0, once=True)
    out = capsys.readouterr().out
    assert "rank 1 does not answer\n" in out and "train.py:24" not in out and "in a step for" in out
    faults = f'Stack (most recent call first):\n  File "{TRAIN}", line 58 in crunch\n'
    (run.path / "ranks/00001/faults.txt").write_text(faults)
    watch(run.path, 1.0, once=True)
    assert "rank 1 does not answer at /job/train.py:58 (crunch)\n" in capsys.readouterr().out
    monkeypatch.setattr("ddpdoctor.cli.watch_loop.is_stopped", lambda rank: rank.rank == 1)
    watch(run.path, 1.0, once=True)
    out = capsys.readouterr().out
    assert out.count("rank 1") == 1 and "rank 1 is stopped (SIGSTOP)\n" in out


@pytest.mark.parametrize(("computes", "words"), [(True, "computes"), (False, "is stuck"), (None, "is stuck")])
def test_a_computing_rank_is_not_reported_as_stuck(tmp_path, monkeypatch, capsys, computes, words):
    run = Stopped(tmp_path / "run", ended=False)  # on another host
    for log in run.path.glob("ranks/*/steps.jsonl"):
        log.write_text("".join(line for line in log.open() if not line.startswith('{"end"')))
    run.rank(0, "backward", REDUCING).rank(1, "other", [[TRAIN, 57, "load"]])
    run.seen(0, WAITING, waits=True).seen(1, WAITING, waits=False, computes=computes).stall("lasts")
    monkeypatch.setattr(WatchedRun, "analyze", lambda watched: None)
    watch(run.path, 1.0, once=True)
    assert f"rank 1 {words} at /job/train.py:57 (load)\n" in capsys.readouterr().out


@pytest.mark.extended
def test_many_ranks_and_gpus_fit_the_screen(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    info = json.loads((run / "ranks" / "00000" / "rank.json").read_text())
    for rank in range(2, 40):
        folder = run / "ranks" / f"{rank:05d}"
        shutil.copytree(run / "ranks" / "00000", folder)
        (folder / "rank.json").write_text(json.dumps({**info, "rank": rank}))
    (telemetry,) = run.glob("hosts/*/telemetry.jsonl")
    gpus = [{"index": 3, "gpu_utilization_percent": 97, "memory_used_bytes": 16 << 30, "power_watts": None}]
    with telemetry.open("a") as out:
        out.write(json.dumps({"t_ns": time.time_ns(), "host": {}, "ranks": {}, "gpus": gpus}) + "\n")
    code, out, _ = doctor("watch", run)
    assert code == 0 and len(out.splitlines()) < 40
    assert "and 24 ranks that are less late" in out and re.search(r"^ +1 +99 ", out, re.MULTILINE)
    assert re.search(r"^ +3 +host1 +97 % +16 GiB +– +–", out, re.MULTILINE)


def test_keys_sort_show_phases_and_quit(tmp_path):
    """On a terminal, whose settings are restored afterwards."""
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest.update(ended_ns=None, exit_code=None, host="elsewhere")
    (run / "manifest.json").write_text(json.dumps(manifest))
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    terminal = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    watching = subprocess.Popen(
        [*DOCTOR, "watch", str(run)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    seen = []
    threading.Thread(target=read_all, args=(ours, seen), daemon=True).start()
    shown = lambda text: until(lambda: text in "".join(seen))  # noqa: E731
    shown("q quit · s sort (by rank)")
    os.write(ours, b"s")
    shown("s sort (by lateness)")
    assert "backward" in "".join(seen) and "checkpoint" not in "".join(seen)
    os.write(ours, b"p")
    shown("optimizer")
    os.write(ours, b"q")
    assert watching.wait(30) == 0
    assert termios.tcgetattr(theirs)[3] == before[3]


def read_all(handle, seen):
    while True:
        try:
            data = os.read(handle, 1 << 16)
        except OSError:
            return
        seen.append(data.decode(errors="replace"))


def test_a_running_job_is_followed_to_its_end_and_scraped(once):
    live = live_run(once)
    code, out, err = live.said["watch"]
    assert (code, err) == (0, "")
    frames = out.split(str(live.run))[1:]
    assert len(frames) > 3 and "running for" in frames[0] and "ended after" in frames[-1]
    assert "Rank 1 waits" in frames[-1] and f"{TRAINED} steps done" in frames[-1]
    assert any("running for" in frame and "step time" in frame for frame in frames)
    assert "ddpdoctor_late_seconds" in live.said["metrics"][1]


def test_a_port_in_use_does_not_affect_the_job(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = doctor(
            "run",
            "--out",
            tmp_path / "run",
            "--prometheus",
            port,
            "--",
            "sh",
            "-c",
            "echo fine; exit 7",
        )
    assert (code, out) == (7, "fine\n")
    assert len([line for line in err.splitlines() if "--prometheus" in line]) == 1


@pytest.mark.parametrize("address", ["http", "70000", ":9400", "127.0.0.1:"])
def test_an_invalid_address_is_refused_before_the_job(tmp_path, address):
    code, out, err = doctor("run", "--out", tmp_path / "run", "--prometheus", address, "--", "echo", "ran")
    assert (code, out) == (2, "") and err.startswith(f"ddpdoctor: --prometheus {address}: give a port")


TRAINS_UNTIL = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not os.path.exists(sys.argv[1]):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.mark.torchrun
@pytest.mark.extended
def test_idle_clients_do_not_affect_the_recording(tmp_path):
    """As many connections as the launcher's processes may have files, by anybody on the machine: all is recorded, scrapes are
    answered, and nobody is left behind."""
    pytest.importorskip("torch")
    run, port, enough = tmp_path / "run", free_port(), tmp_path / "enough"
    (tmp_path / "job.py").write_text(TRAINS_UNTIL)
    options = ["--out", str(run), "--no-analysis", "--no-profile", "--prometheus", str(port)]
    launcher = subprocess.Popen(
        [*DOCTOR, "run", *options, "--", *forked(tmp_path / "job.py", str(enough), ranks=0)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)),
    )
    held, log = [], run / "ranks" / "00000" / "steps.jsonl"
    try:
        until(lambda: "ddpdoctor_steps_total" in metrics(port) and log.exists())
        for _ in range(120):
            held.append(socket.create_connection(("127.0.0.1", port), 10))
            held[-1].sendall(b"GET /metrics HT")
        for _ in range(2):
            size = log.stat().st_size
            until(lambda size=size: log.stat().st_size > size, within_s=20)
            assert "ddpdoctor_steps_total" in metrics(port, patient=False)
        enough.touch()
        assert launcher.wait(60) == 0
    finally:
        enough.touch()
        launcher.kill()
        _, err = launcher.communicate()
        for client in held:
            client.close()
    assert "cannot" not in err and "Too many" not in err
    with pytest.raises(OSError):
        metrics(port, patient=False)


@pytest.mark.extended
def test_the_metrics_end_with_a_killed_storage_process(tmp_path):
    run, port = tmp_path / "run", free_port()
    options = ["--out", str(run), "--no-analysis", "--no-profile", "--prometheus", str(port)]
    launcher = subprocess.Popen(
        [*DOCTOR, "run", *options, "--", "sleep", "60"], env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: metrics(port))
        (exporter,) = [each for each in psutil.process_iter() if listens(each.pid, port)]
        storage_process = exporter.parent()
        assert storage_process.ppid() == launcher.pid
        storage_process.kill()
        exporter.wait(10)
    finally:
        launcher.terminate()
        launcher.wait(30)


def listens(pid, port):
    try:
        return any(
            each.laddr.port == port
            for each in psutil.Process(pid).net_connections()
            if each.status == "LISTEN"
        )
    except psutil.Error:
        return False
