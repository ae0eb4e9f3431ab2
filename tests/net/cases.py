"""The cases by group: what each is called, and how to lay out what is to be analysed."""

from __future__ import annotations

import gzip
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.python import unpack

from . import generated

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
TRACES = ROOT.parent / "shared" / "traces"
RUNS = Path(__file__).parent / "runs"


@dataclass(frozen=True)
class Group:
    """Cases of one origin. ``lay_out(name, folder)`` may write to the folder, and returns what is to be analysed."""

    names: Callable[[], list[str]]
    lay_out: Callable[[str, Path], Path]
    place: Path | None = None
    """Where the cases lie; the group is left out where that is absent. None: they are made."""


def _fixtures() -> list[str]:
    return sorted(path.parent.name for path in FIXTURES.glob("*/manifest.json"))


def _traces() -> list[str]:
    """Each folder with files in it, and each broken or odd file by itself."""
    files = [path for path in TRACES.rglob("*") if path.is_file() and path.parent != TRACES]
    odd = [path for path in files if path.parent.name == "odd"]
    tables = [path for path in files if path.suffix == ".parquet"]
    several_jobs = [TRACES / "hta" / "trace_diff"]
    places = {path.parent for path in files} | {*odd, *tables, *several_jobs}
    return sorted(str(path.relative_to(TRACES)) for path in places)


def _runs() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in RUNS.glob("*.tar.xz"))


def _unpacked(name: str, folder: Path) -> Path:
    """The run directory as it was recorded: its traces lie plain in the archive, see :func:`tests.net.record.pack`."""
    run = folder / "run"
    with lzma.open(RUNS / f"{name}.tar.xz") as packed, tarfile.open(fileobj=packed) as archive:
        unpack(archive, run)
    for trace in run.glob("ranks/*/trace.json"):
        trace.with_name("trace.json.gz").write_bytes(gzip.compress(trace.read_bytes(), 1, mtime=0))
        trace.unlink()
    return run


GROUPS = {
    "fixtures": Group(_fixtures, lambda name, folder: FIXTURES / name, FIXTURES),
    "traces": Group(_traces, lambda name, folder: TRACES / name, TRACES),
    "generated": Group(generated.names, generated.make),
    "runs": Group(_runs, _unpacked, RUNS),
}
