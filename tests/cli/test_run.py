"""``ddpdoctor run`` does not change a job's streams, exit codes, signals and files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "ddpdoctor", "run"]

CATCHER = """
import os, signal, sys, time
def handler(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "CONT", "TERM"):
    signal.signal(getattr(signal, "SIG" + name), handler)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def environment():
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("DDPDOCTOR_", "SLURM_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(tmp_path, environment):
    """Start ``ddpdoctor run`` in a process group of its own, in ``tmp_path``."""
    started = []

    def run(*arguments, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment} | options
        process = subprocess.Popen([*RUN, *map(str, arguments)], cwd=tmp_path, process_group=0, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process, timeout_s=60):
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err.decode()


def manifest(tmp_path):
    (path,) = tmp_path.glob("ddpdoctor-runs/*/manifest.json")
    return json.loads(path.read_text())


def test_streams_are_the_jobs_own_byte_for_byte(start, tmp_path):
    job = (
        "import os,sys; d=sys.stdin.buffer.read(); os.write(1, b'out\\x00\\xff'+d); "
        "os.write(2, b'err\\xfe\\r'); print(os.isatty(0), file=sys.stderr)"
    )
    plain = subprocess.run([sys.executable, "-c", job], input=b"\x01in", capture_output=True)
    process = start("--", sys.executable, "-c", job, stdin=subprocess.PIPE)
    out, err = process.communicate(b"\x01in", timeout=60)
    assert out == plain.stdout
    assert err.startswith(plain.stderr)
    added = err[len(plain.stderr) :].decode().splitlines()
    assert len(added) == 1
    assert added[0].startswith("ddpdoctor: no rank was recorded")


@pytest.mark.parametrize(
    ("command", "code"),
    [(["true"], 0), (["--", "sh", "-c", "exit 7"], 7), ([sys.executable, "-c", "raise SystemExit(3)"], 3)],
)
def test_exit_code_is_the_jobs(start, tmp_path, command, code):
    assert finish(start(*command))[0] == code
    document = manifest(tmp_path)
    assert document["exit_code"] == code
    assert document["signal"] is None
    assert document["ended_ns"] > document["started_ns"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGKILL, signal.SIGINT, signal.SIGPIPE]
)
def test_the_launcher_ends_with_the_jobs_signal(start, tmp_path, number):
    assert finish(start("sh", "-c", f"kill -{number.value} $$"))[0] == -number
    assert manifest(tmp_path)["signal"] == number
    assert not list(tmp_path.glob("core*"))


def test_options_after_the_command_belong_to_it(start):
    code, out, _ = finish(start("--no-telemetry", "echo", "--out", "x", "--", "-q", "--help"))
    assert (code, out) == (0, b"--out x -- -q --help\n")


def test_a_script_without_interpreter_line_runs_as_in_a_shell(start, tmp_path):
    (tmp_path / "job.sh").write_text("echo $1; exit 4\n")
    (tmp_path / "job.sh").chmod(0o755)
    assert finish(start("./job.sh", "hello"))[:2] == (4, b"hello\n")


@pytest.mark.parametrize(
    ("program", "code", "words"), [("no-such-tool", 127, "command not found"), ("./data", 126, "executed")]
)
def test_a_command_that_cannot_start(start, tmp_path, program, code, words):
    (tmp_path / "data").write_text("")
    returned, out, err = finish(start("--out", "RUN", "--", program))
    assert (returned, out) == (code, b"")
    assert len(err.splitlines()) == 1 and words in err
    assert not (tmp_path / "RUN").exists()


def test_no_command_and_bad_options_are_one_sentence(start):
    for arguments in ([], ["--profile-steps", "9:3", "true"], ["--max-trace-mb", "0", "true"]):
        code, _, err = finish(start(*arguments))
        assert code == 2
        assert "Traceback" not in err


def test_an_existing_run_is_refused_before_the_job_starts(start, tmp_path):
    assert finish(start("--out", "RUN", "true"))[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "RUN").rglob("*") if path.is_file()}
    code, _, err = finish(start("--out", "RUN", "--", "touch", "started"))
    assert code == 2
    assert err.count("\n") == 1 and "already holds a finished run; choose another --out" in err
    assert not (tmp_path / "started").exists()
    assert before == {path: path.read_bytes() for path in (tmp_path / "RUN").rglob("*") if path.is_file()}


def test_an_unwritable_run_directory_does_not_affect_the_job(start):
    code, out, err = finish(start("--out", "/proc/none/run", "--", "sh", "-c", "echo hello; exit 6"))
    assert (code, out) == (6, b"hello\n")
    assert err.count("\n") == 1 and "nothing is recorded and the job runs alone" in err


def test_a_removed_run_directory_does_not_affect_the_job(start):
    job = "until [ -e RUN/hosts/*/telemetry.jsonl ]; do sleep 0.1; done; rm -r RUN; echo hello; exit 6"
    code, out, err = finish(start("--out", "RUN", "--", "sh", "-c", job))
    assert (code, out) == (6, b"hello\n")
    assert "could not be completed" in err and "Traceback" not in err


def test_stopping_and_continuing(start):
    process = start("--", sys.executable, "-c", CATCHER)
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout.readline() == b"SIGCONT\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == b"SIGTERM\n"
    assert finish(process)[0] == 5


def test_launchers_of_one_job_share_a_run(start, tmp_path, environment):
    slurm = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "1"}
    processes = [
        start(
            "--",
            "sh",
            "-c",
            f"sleep 0.5; exit {task}",
            env={**environment, **slurm, "SLURM_PROCID": str(task)},
        )
        for task in range(3)
    ]
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 1, 2]
    assert sum("no rank was recorded" in err for _, _, err in results) == 1
    run = tmp_path / "ddpdoctor-runs" / "slurm-9.1-sh"
    launches = [json.loads(path.read_text()) for path in run.glob("hosts/*/launch-*.json")]
    assert sorted(launch["exit_code"] for launch in launches) == [0, 1, 2]
    assert manifest(tmp_path)["job_id"] == "slurm-9.1"
