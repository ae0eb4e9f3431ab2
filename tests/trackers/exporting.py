"""``ddpdoctor export`` of a fixture into a tracker, by the real command in a process that reaches no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ddpdoctor.report.json_output import write_json
from tests.report import samples

ROOT = Path(__file__).parents[2]
RUN = ROOT / "fixtures" / "slow-data-one-rank"
_ALONE = "import ctypes, os; ctypes.CDLL(None).unshare(0x40000000 | 0x10000000)"
"""A network namespace of its own (CLONE_NEWNET, in a user namespace): nothing but a loopback that is down."""


def export(folder: Path, *options: str, what: Path = RUN, **more: str) -> subprocess.CompletedProcess[str]:
    """Its end, which must be good; in ``folder``, whose own home it has."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    code = f"{_ALONE}; import sys; sys.argv = {['ddpdoctor', 'export', str(what), *options]!r}; from ddpdoctor.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), "HOME": str(home), **more},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def mentions(folder: Path, word: str) -> list[Path]:
    """Files below ``folder`` in whose name or bytes ``word`` stands."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [
        file for file in files if word in str(file.relative_to(folder)) or word.encode() in file.read_bytes()
    ]


NAMES = ("node17", "alice")
"""Of a host and a user, in the report that :func:`names_left` exports."""


def names_left(folder: Path, *options: str, **more: str) -> list[Path]:
    """Where ``NAMES`` stand in what ``options`` write into ``folder``/out."""
    write_json(samples.unhealthy(), folder / "diagnosis.json")
    export(folder, *options, what=folder / "diagnosis.json", **more)
    return [file for name in NAMES for file in mentions(folder / "out", name)]
