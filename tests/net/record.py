"""``python -m tests.net.record``: records the runs under ``tests/net/runs`` anew, with the jobs of the lab.

That is rarely right: a new recording is a new case, and the old answer is lost with the old run.
"""

from __future__ import annotations

import argparse
import gzip
import io
import socket
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.lab.cases import Case
from tests.lab.faults import find
from tests.lab.planting import Plant
from tests.lab.running import REPOSITORY, Job, command, environment, write
from tests.lab.traps import TRAPS
from tests.lab.trial import Bench

RUNS = Path(__file__).parent / "runs"
STEP_MS, BASE_MS, SHARE = 15.0, 25.0, 0.4
STEPS = 60
"""Enough for a cause that comes every tenth step to come five times after the warm-up."""
WINDOW = "20:22"


@dataclass(frozen=True)
class Recording:
    """One run to record: a fault or a trap of the lab, in a script that it can be written into."""

    name: str
    script: str
    profiled: bool


RECORDINGS = (
    Recording("data-one", "mlp", True),
    Recording("data-all-worker", "cnn", False),
    Recording("forward-one", "transformer", True),
    Recording("backward-one", "mlp", False),
    Recording("between-one", "spawned", True),
    Recording("before-average-one", "byhand", True),
    Recording("after-backward-one", "accumulate", False),
    Recording("optimizer-one", "mlp", True),
    Recording("uneven-batch", "mlp", False),
    Recording("every-k-one", "transformer", False),
    Recording("gc-one", "mlp", True),
    Recording("checkpoint-barrier", "spawned", False),
    Recording("barrier", "mlp", True),
    Recording("many-metrics", "spawned", True),
    Recording("worker-start", "cnn", False),
    Recording("huge-model", "mlp", False),
    Recording("healthy-mlp", "mlp", True),
    Recording("healthy-byhand", "byhand", False),
    Recording("trap-evaluation", "cnn", False),
    Recording("trap-one-slow-step", "spawned", True),
)


def main() -> int:
    """Record what is chosen; each run replaces the one of its name."""
    parser = argparse.ArgumentParser(prog="python -m tests.net.record", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="runs whose name contains this")
    chosen = parser.parse_args()
    RUNS.mkdir(exist_ok=True)
    for recording in RECORDINGS:
        if chosen.pattern in recording.name:
            with tempfile.TemporaryDirectory(prefix="net") as folder:
                run = record(recording, Path(folder))
                file = RUNS / f"{recording.name}.tar.xz"
                pack(run, file, Path(folder))
            print(f"{recording.name}: {file.stat().st_size} bytes", flush=True)
    return 0


def record(recording: Recording, folder: Path) -> Path:
    """The run directory of the job, run under the real command line. Raises RuntimeError where the job fails."""
    random = Random(recording.name)
    job = Job(recording.script, 2, STEP_MS)
    plants = _plants(recording, job, random)
    script = write(folder, job, plants)
    more = (*(argument for plant in plants for argument in plant.arguments), "--steps", str(STEPS))
    run = folder / "run"
    window = ["--profile-steps", WINDOW] if recording.profiled else ["--no-profile"]
    line = [sys.executable, "-m", "ddpdoctor", "run", "--out", str(run), "--no-analysis", *window, "--"]
    line += command(job, script, more, random)
    done = subprocess.run(
        line, env=environment(), cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{recording.name}: {(done.stdout + done.stderr).strip()}")
    return run


def _plants(recording: Recording, job: Job, random: Random) -> list[Plant]:
    trap = next((trap for trap in TRAPS if trap.name == recording.name), None)
    if trap:
        return [trap.plant(random)]
    fault = find(recording.name)
    rank = 1 if fault.rank is None else fault.rank
    case = Case(recording.name, job, 1, "strong", SHARE, fault, rank=rank)
    return Bench(Path(), base_ms=BASE_MS).planted(case, fault, random)[0]


def pack(run: Path, file: Path, folder: Path) -> None:
    """The run as one archive, without names and paths of this machine. Traces lie in it plain, as xz packs them
    better than what gzip has packed."""
    names = {
        str(folder): "/home/user/job",
        str(REPOSITORY): "/home/user/ddpdoctor",
        sys.prefix: "/home/user/venv",
        sys.base_prefix: "/usr",
        f'"{socket.gethostname()}"': '"host1"',
        f"hosts/{socket.gethostname()}/": "hosts/host1/",
    }
    with tarfile.open(file, "w:xz", preset=9) as archive:
        for path in sorted(run.rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                content = gzip.decompress(content) if path.suffix == ".gz" else content
                name = str(path.relative_to(run)).removesuffix(".gz")
                entry = tarfile.TarInfo(_replaced(name.encode(), names).decode())
                content = _replaced(content, names)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def _replaced(text: bytes, names: dict[str, str]) -> bytes:
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name.encode(), names[name].encode())
    return text


if __name__ == "__main__":
    sys.exit(main())
