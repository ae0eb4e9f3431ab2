"""The cases by group: their names, and how to make their input."""

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
    """Cases of one origin. ``make(name, folder)`` returns the path to analyse; it may write to ``folder``."""

    names: Callable[[], list[str]]
    make: Callable[[str, Path], Path]
    place: Path | None = None
    """Folder of the cases; the group is skipped if it does not exist. None: the cases are generated."""


def _fixtures() -> list[str]:
    return sorted(path.parent.name for path in FIXTURES.glob("*/manifest.json"))


def _traces() -> list[str]:
    """Each folder that contains files, and each file of its own case: odd files and tables."""
    files = [path for path in TRACES.rglob("*") if path.is_file() and path.parent != TRACES]
    odd = [path for path in files if path.parent.name == "odd"]
    tables = [path for path in files if path.suffix == ".parquet"]
    several_jobs = [TRACES / "hta" / "trace_diff"]
    places = {path.parent for path in files} | {*odd, *tables, *several_jobs}
    return sorted(str(path.relative_to(TRACES)) for path in places)


def _runs() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in RUNS.glob("*.tar.xz"))


def _unpack_run(name: str, folder: Path) -> Path:
    """The run directory as it was recorded. Its traces are uncompressed in the archive, see :func:`tests.net.record.pack`."""
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
    "runs": Group(_runs, _unpack_run, RUNS),
}
