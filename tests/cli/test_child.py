"""The analysis at the end of a run never changes the job's exit code and records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
import numpy, polars
from ddpdoctor import analysis
from ddpdoctor.cli import child, main, run_and_present

def analyze(paths, options=None):
    Path("child").write_text(str(os.getpid()))
    {fault}

analysis.analyze = analyze
{more}
main()
"""
JOB = ["sh", "-c", "mkdir -p run/ranks/00000; exit 7"]
HANG = "time.sleep(60)"
SMALL = "child._free_bytes = lambda: 100 << 20"
EXTENDED = pytest.mark.extended
AGAIN = "`ddpdoctor analyze "


def start(folder: Path, fault: str, more: str = "", *options: str, **popen) -> subprocess.Popen[str]:
    """``ddpdoctor run`` of a job that leaves a rank and ends with 7; its analysis does ``fault``."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            LAUNCHER.format(fault=fault, more=more),
            "run",
            "--out",
            "run",
            *options,
            "--",
            *JOB,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        **popen,
    )


def ended(launcher: subprocess.Popen[str], folder: Path) -> str:
    """The launcher's stderr, after checking the exit code, the manifest, and that no process is left."""
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 7, said
    assert json.loads((folder / "run" / "manifest.json").read_text())["exit_code"] == 7
    assert not psutil.pid_exists(int((folder / "child").read_text()))
    assert "Traceback" not in said
    return said


def until_it_analyses(folder: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not ((folder / "child").exists() and (folder / "child").read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL, as happens when memory runs out"),
        pytest.param("os.abort()", "ended by SIGABRT, as happens when memory runs out", marks=EXTENDED),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)", marks=EXTENDED),
        ("raise MemoryError", "needs more memory than is free on this machine"),
        ("os._exit(3)", "ended with exit code 3"),
    ],
)
def test_a_killed_analysis_is_reported_in_one_sentence(tmp_path, fault, words):
    said = ended(start(tmp_path, fault), tmp_path)
    assert words in said and said.count("ddpdoctor: the analysis") == 1 and AGAIN in said


@pytest.mark.parametrize(
    ("taking", "words"),
    [
        ("numpy.ones(1 << 30)", "needs more memory"),
        pytest.param("[bytearray(1 << 20) for _ in range(8192)]", "needs more memory", marks=EXTENDED),
        pytest.param(
            "polars.select(polars.int_range(0, 1 << 30, eager=False)).sum()", "SIGABRT", marks=EXTENDED
        ),
    ],
)
def test_an_analysis_is_limited_to_the_free_memory(tmp_path, taking, words):
    said = ended(start(tmp_path, taking, SMALL), tmp_path)
    assert words in said and AGAIN in said


@pytest.mark.extended
def test_an_analysis_has_a_time_limit(tmp_path):
    said = ended(start(tmp_path, HANG, "run_and_present._MIN_TIME_LIMIT_S = 4.0"), tmp_path)
    assert "the analysis took too long and was ended" in said and AGAIN in said


def test_an_error_of_the_analysis_is_reported(tmp_path):
    said = ended(start(tmp_path, "raise ValueError('odd')"), tmp_path)
    assert "could not be analyzed; the recording is in" in said and "ValueError: odd" in said


@pytest.mark.parametrize(
    ("number", "group"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, False, marks=EXTENDED),
        pytest.param(signal.SIGHUP, False, marks=EXTENDED),
    ],
)
def test_a_request_to_end_stops_the_analysis_at_once(tmp_path, number, group):
    launcher = start(tmp_path, HANG)
    until_it_analyses(tmp_path)
    (os.killpg if group else os.kill)(launcher.pid, number)
    said = ended(launcher, tmp_path)
    assert said.count("interrupted during the analysis") == 1 and AGAIN in said


@pytest.mark.extended
def test_an_analysis_that_does_not_stop_is_killed_and_a_second_signal_ignored(tmp_path):
    deaf = "[signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)), time.sleep(60)]"
    launcher = start(tmp_path, deaf)
    until_it_analyses(tmp_path)
    for _ in range(3):
        os.killpg(launcher.pid, signal.SIGTERM)
        time.sleep(0.05)
    assert "interrupted during the analysis" in ended(launcher, tmp_path)


@pytest.mark.extended
def test_processes_of_the_analysis_end_with_it(tmp_path):
    helper = "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True)"
    fault = f"{helper}; Path('helper').write_text(str(p.pid)); time.sleep(60)"
    launcher = start(tmp_path, fault, "run_and_present._MIN_TIME_LIMIT_S = 4.0")
    ended(launcher, tmp_path)
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(int((tmp_path / "helper").read_text())):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_analysis_dies_with_a_launcher_that_is_killed(tmp_path):
    launcher = start(tmp_path, HANG)
    until_it_analyses(tmp_path)
    launcher.kill()
    launcher.communicate(timeout=30)
    child, deadline_s = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_analysis_is_waited_for_if_sigchld_is_ignored(tmp_path):
    code = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from ddpdoctor.cli.child import ChildFailedError, run_in_child
try:
    run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), 10)
except ChildFailedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert "SIGKILL" in done.stdout


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux's /proc")
@pytest.mark.extended
def test_the_oom_killer_prefers_the_analysis(tmp_path):
    score = "Path('score').write_text(Path('/proc/self/oom_score_adj').read_text()); raise ValueError"
    ended(start(tmp_path, score), tmp_path)
    assert (tmp_path / "score").read_text().strip() == "1000"
