"""Runs ``ddpdoctor try`` as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hook.recording import JOBS, TORCHRUN, plain_environment
from tests.launch.launched import spools_below

ROOT = Path(__file__).parents[2]
OURS = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from ddpdoctor.cli import main; main()",
]
JOB = [*TORCHRUN, "2", str(JOBS / "tried.py")]


def tried(
    tmp_path, *arguments: str, timeout_s: float = 500, temporary: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """In ``tmp_path``, with temporary files in there as well where ``temporary`` is no other folder."""
    beside = temporary or tmp_path
    environment = plain_environment(XDG_CACHE_HOME=str(beside / "cache"), TMPDIR=str(beside))
    return subprocess.run(
        [*OURS, "try", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def trying(folder: Path, temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    """In ``folder``, begun and measured so far that the job as it is has a step time; ``temporary`` for temporary files."""
    process = subprocess.Popen(
        [*OURS, "try", *arguments],
        cwd=folder,
        env=plain_environment(TMPDIR=str(temporary)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("ms a step" in line for line in iter(process.stderr.readline, ""))
    return process


def runs_below(process: Path, folder: Path) -> bool:
    """Whether a process of /proc works in a folder, or below it."""
    try:
        return os.readlink(process / "cwd").startswith(str(folder))
    except OSError:
        return False


def nothing_left(folder: Path) -> None:
    """No process, no folder and no spool of a trial."""
    assert [entry for entry in Path("/proc").glob("[0-9]*") if runs_below(entry, folder)] == []
    assert list(folder.glob("ddpdoctor-trial-*")) == []
    assert spools_below(folder) == []
