"""``python -m tests.net.record``: records the runs under ``tests/net/runs`` anew, with real jobs of the exam.

That is rarely right: a new recording is a new case, and the old answer is lost with the old run.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import socket
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.exam.real import twin
from tests.exam.real.draw import program
from tests.exam.real.kinds import TRAPS, Asked, Shape
from tests.exam.real.record import JOB_S, REPOSITORY, RUN, run

RUNS = Path(__file__).parent / "runs"
STEPS = 60
"""Enough for a cause in every tenth step to occur five times after the warm-up."""
WINDOW = "20:22"


@dataclass(frozen=True)
class Recording:
    """A run to record. ``of``: a kind of fault or a trap of the exam."""

    name: str
    of: str
    shape: Shape
    profiled: bool
    spawned: bool = False


MLP, CONV, TRANSFORMER = ({"model": model, "workers": 0} for model in ("mlp", "conv", "transformer"))
RECORDINGS = (
    Recording("data-one", "data-one", MLP, True),
    Recording("data-all-worker", "worker-all", CONV, False),
    Recording("forward-one", "forward-one", TRANSFORMER, True),
    Recording("backward-one", "backward-one", MLP, False),
    Recording("between-one", "between", MLP, True, spawned=True),
    Recording("before-average-one", "before-average", TRANSFORMER, True),
    Recording("after-backward-one", "after-backward", {**MLP, "parts": 4}, False),
    Recording("optimizer-one", "optimizer-one", MLP, True),
    Recording("uneven-batch", "uneven", MLP, False),
    Recording("every-k-one", "rare", TRANSFORMER, False),
    Recording("gc-one", "collection-one", MLP, True),
    Recording("checkpoint-barrier", "checkpoint-barrier", MLP, False, spawned=True),
    Recording("barrier", "barrier", MLP, True),
    Recording("many-metrics", "reductions", MLP, True, spawned=True),
    Recording("worker-start", "worker-start", CONV, False),
    Recording("huge-model", "huge-model", MLP, False),
    Recording("healthy-mlp", "trap-nothing", {}, True),
    Recording("healthy-byhand", "trap-by-hand", {}, False),
    Recording("trap-evaluation", "trap-evaluation", {}, False),
    Recording("trap-one-slow-step", "trap-one-slow-step", {}, True),
)


def main() -> int:
    """Record the chosen runs. Each replaces the run of the same name."""
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
    """Run the job under the real command line. Returns its run directory. Raises RuntimeError if the job fails."""
    trap = TRAPS.get(recording.of)
    asked = trap or Asked(recording.of, recording.shape, spawned=recording.spawned)
    drawn = program(1, folder / "job", asked)
    twin.run(folder / "job", drawn.world, JOB_S)  # determines the amount of the fault
    plan = folder / "job" / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"steps": STEPS}))
    run(drawn, folder, ["--profile-steps", WINDOW] if recording.profiled else ["--no-profile"])
    return folder / RUN


def pack(run: Path, file: Path, folder: Path) -> None:
    """Write the run to an archive without names and paths of this machine. Traces are stored uncompressed, because xz compresses them
    better than gzip data."""
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
