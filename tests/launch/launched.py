"""Runs jobs under ``ddpdoctor run``, and finds interpreters that have the launchers to be tried."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ddpdoctor import analyze
from ddpdoctor.rundir import RUN_SCHEMA, new_run_id
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.liveness import WRITER_FILE
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.hook.recording import JOBS, REPOSITORY, Recorded, plain_environment

TINY = str(JOBS / "tiny_ddp.py")
_MAIN = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from ddpdoctor.cli import main; main()"
DDPDOCTOR_RUN = [sys.executable, "-c", _MAIN, "run", "--no-analysis"]
"""Without a path in the environment, where the job would find ddpdoctor too."""
SCHEDULERS = (
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "TORCHELASTIC_",
)


DEAD = 2**22 + 1
"""No process has this id."""


def make_run(path: Path, **fields: object) -> Path:
    """A run directory that holds a manifest alone."""
    path.mkdir(parents=True)
    document = {"schema": RUN_SCHEMA, "run_id": new_run_id(), **fields}
    (path / "manifest.json").write_text(json.dumps(document))
    return path


def left_behind(run: Path, rank: int = 0, pid: int = DEAD, line: bytes = b'{"step":0}\n') -> Path:
    """A spool with a line of a rank that has its folder in ``run``, and that is dead unless ``pid`` says otherwise."""
    spool = Spool(make_spool_root(str(run)), rank, str(run))
    drain(spool.directory)
    spool.write("steps.jsonl", line)
    renamed = Path(spool.directory).with_name(f"{rank:05d}-{pid}")
    os.rename(spool.directory, renamed)
    written_by(renamed, pid)
    return renamed


def written_by(spool: Path, pid: int, **more: object) -> None:
    """Have a spool's writer be another process than this one, with what else its document is to say."""
    document = json.loads((spool / WRITER_FILE).read_text())
    began = document["started"] if pid == os.getpid() else 1
    (spool / WRITER_FILE).write_text(json.dumps({**document, "pid": pid, "started": began, **more}))


def age(root: Path, by_s: float = 2 * 24 * 3600) -> None:
    """Have nobody written to what is below ``root`` for so long."""
    then = time.time() - by_s
    for path in (*root.rglob("*"), root):
        with contextlib.suppress(FileNotFoundError):  # a launcher may be about to remove it
            os.utime(path, (then, then))


def clean_environment(**more: str) -> dict[str, str]:
    """Nothing of a scheduler's or of ddpdoctor's, but what is given."""
    kept = {
        name: value
        for name, value in plain_environment().items()
        if not name.startswith((*SCHEDULERS, "DDPDOCTOR_"))
    }
    return {**kept, **more}


def spools_below(folder: Path) -> list[Path]:
    """The spools in memory-backed storage of run directories below ``folder``; others come and go meanwhile."""
    below = []
    for target in Path("/dev/shm").glob(f"ddpdoctor-{os.getuid()}-*/*/target"):
        with contextlib.suppress(FileNotFoundError):
            if target.read_text().startswith(str(folder)):
                below.append(target.parent)
    return below


def run_under(
    tmp: Path,
    command: Sequence[str],
    *options: str,
    environment: dict[str, str] | None = None,
    timeout_s: float = 180,
    by: Sequence[str] = DDPDOCTOR_RUN,
) -> Recorded:
    """``ddpdoctor run --out tmp/run options -- command`` in ``tmp``; ``by`` another command for its first two words."""
    process = subprocess.run(
        [*by, "--out", "run", *options, "--", *command],
        env=environment or clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=tmp,
        check=False,
    )
    return Recorded(process, tmp / "run")


@contextlib.contextmanager
def running(
    folder: Path,
    command: Sequence[str],
    *options: str,
    out: str | Path = "run",
    analysis: bool = False,
    **variables: str,
) -> Iterator[subprocess.Popen[str]]:
    """``ddpdoctor run --out OUT options -- command`` in ``folder``, in a process group of its own. It is killed with the block, and all
    below it."""
    run = DDPDOCTOR_RUN[:-1] if analysis else DDPDOCTOR_RUN
    process = subprocess.Popen(
        [*run, "--out", str(out), *options, "--", *command],
        cwd=folder,
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        yield process
    finally:
        kill([*descendants(process.pid), process.pid])
        process.communicate(timeout=30)


def kill(pids: Sequence[int]) -> None:
    """Those of them that there still are."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """All processes below one, parents first."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def command_of(pid: int) -> bytes:
    """Its command line; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def steps_taken(run: Path, ranks: int = 2) -> int:
    """Steps that each of the ranks has recorded so far."""
    logs = [run / "ranks" / f"{rank:05d}" / "steps.jsonl" for rank in range(ranks)]
    return min(log.read_bytes().count(b'"step":') if log.exists() else 0 for log in logs)


def pids_of(run: Path, ranks: int = 2) -> list[int]:
    """Process ids of ranks that have recorded something."""
    documents = [run / "ranks" / f"{rank:05d}" / "rank.json" for rank in range(ranks)]
    return [json.loads(document.read_text())["pid"] for document in documents]


def python_with(*packages: str, program: str = "") -> str:
    """An interpreter that has ``packages`` and torch, and ``program`` beside it: this one, or the one that
    DDPDOCTOR_JOB_PYTHON names, which has no need of ddpdoctor. Skips the test where there is none.
    """
    for candidate in filter(None, (sys.executable, os.environ.get("DDPDOCTOR_JOB_PYTHON"))):
        complete = not program or program_of(candidate, program).exists()
        if complete and all(_has(candidate, package) for package in ("torch", *packages)):
            return candidate
    wanted = ", ".join([*packages, *([program] if program else [])])
    return pytest.skip(f"no interpreter with {wanted} here; DDPDOCTOR_JOB_PYTHON may name one")


@functools.cache
def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def program_of(python: str, name: str) -> Path:
    """Where a console command lies that was installed beside ``python``."""
    return Path(python).parent / name


def two_ranks_took(recorded: Recorded, steps: int) -> None:
    """The job went as planned, and both ranks have recorded each of its steps."""
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.folders() == ["00000", "00001"], recorded.process.stderr
    assert [len(recorded.steps(rank)) for rank in (0, 1)] == [steps, steps]
    errors = [recorded.info(rank)["hook"]["errors"] for rank in (0, 1)]
    assert errors == [[], []], errors
    ended_well(recorded.run)


def ended_well(run: Path) -> list[str]:
    """Nobody is told that the job failed, hung or was ended; the notes."""
    diagnosis = analyze(str(run))
    assert diagnosis.facts["hang"]["looked"] and diagnosis.facts["hang"]["state"] is None
    assert diagnosis.standing == [], diagnosis.verdict.headline
    return diagnosis.notes
