"""Run directories of jobs that stopped: a recorded healthy run, with the documents that a stop leaves written beside."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.rundir.liveness import boot_id, pid_namespace
from ddpdoctor.rundir.stops import STANDING_SCHEMA

HEALTHY = Path(__file__).parents[2] / "fixtures" / "healthy"
FIRST_PID = 16_509
"""That of rank 0 in the recorded run."""
NOW_NS = 1_795_228_900_000_000_000
STEP = 100
"""In progress when the recorded run stopped: the one after its last."""
TRAIN = "/job/train.py"
TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCING = [
    [f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward"],
    [TRAIN, 40, "step"],
    [TRAIN, 90, "main"],
]
LOCKED = [["/usr/lib/python3.11/threading.py", 300, "acquire"], [TRAIN, 57, "load"], [TRAIN, 90, "main"]]
BARRIER = [
    [f"{TORCH}/distributed/distributed_c10d.py", 4000, "barrier"],
    [TRAIN, 61, "log"],
    [TRAIN, 90, "main"],
]
WAITING = {"state": "S", "wchan": "ep_poll", "tracer": 0}


class Stopped:
    """A run directory to which stops are added."""

    def __init__(self, folder: Path, *, ended: bool = True, exit_code: int = 1) -> None:
        self.path = folder
        shutil.copytree(HEALTHY, folder)
        for trace in folder.rglob("trace.json.gz"):
            trace.unlink()
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest |= {"exit_code": exit_code} if ended else {"exit_code": None, "ended_ns": None}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        self.stalled: list[dict[str, Any]] = []
        self.gone: list[dict[str, Any]] = []

    def launched_here(self, pid: int = 2**22 + 1) -> Stopped:
        """By process ``pid`` of this machine; no process has the default."""
        self._set("manifest.json", pid)
        return self

    def ran_here(self, rank: int, pid: int) -> Stopped:
        """The same of a rank."""
        self._set(f"ranks/{rank:05d}/rank.json", pid)
        return self

    def _set(self, name: str, pid: int) -> None:
        here = {"host": socket.gethostname(), "boot": boot_id(), "pid_namespace": pid_namespace()}
        document = json.loads((self.path / name).read_text())
        self._write(name, {**document, **here, "pid": pid, "started_ns": time.time_ns()})

    def rank(
        self, rank: int, phase: str, frames: list[list[Any]], name: str = "standing", **more: Any
    ) -> Stopped:
        user = [frame for frame in frames if frame[0] == TRAIN]
        document = {
            "schema": STANDING_SCHEMA if name == "standing" else f"ddpdoctor.{name}/1",
            "rank": rank,
            "pid": FIRST_PID + rank,
            "at_ns": NOW_NS,
            "step": STEP,
        }
        document |= {
            "step_since_ns": NOW_NS - 310_000_000_000,
            "phase": phase,
            "frames": frames,
            "user": user,
        }
        self._write(f"ranks/{rank:05d}/{name}.json", document | more)
        return self

    def seen(self, rank: int, process: dict[str, Any], **more: Any) -> Stopped:
        self.stalled.append(
            {"rank": rank, "pid": FIRST_PID + rank, "answered": True, "process": process} | more
        )
        return self

    def stall(self, state: str = "ended", **more: Any) -> Stopped:
        document = {
            "schema": "ddpdoctor.stall/2",
            "state": state,
            "silent_s": 310.0,
            "detected_ns": NOW_NS - 10**9,
        }
        self._write("hosts/host1/stall.json", document | {"ranks": self.stalled} | more)
        return self

    def ended(self, rank: int, **how: Any) -> Stopped:
        self.gone.append(
            {"rank": rank, "pid": FIRST_PID + rank, "seen_ns": NOW_NS - 300_000_000_000, "step": STEP} | how
        )
        self._write("hosts/host1/ends.json", {"schema": "ddpdoctor.ends/1", "ends": self.gone})
        return self

    def asked(self, number: int, at_ns: int) -> Stopped:
        """By which signal the launcher was asked to end the job, and when."""
        document = {"schema": "ddpdoctor.asked/1", "host": "host1", "signal": number, "at_ns": at_ns}
        self._write("hosts/host1/asked.json", document)
        return self

    def raised(self, rank: int, kind: str, message: str, at_ns: int = NOW_NS, line: int = 70) -> Stopped:
        frames = [[TRAIN, line, "parse"], [TRAIN, 90, "main"]]
        error = {"type": kind, "message": message, "frames": frames}
        return self.rank(rank, "other", frames, "ending", at_ns=at_ns, how="exception", raised=[error])

    def flight(
        self, rank: int, operations: list[tuple[str, int]], pending: int, backend: str = "gloo"
    ) -> Stopped:
        """The recorder of a ``backend``: all is finished but the last ``pending`` operations."""
        entries = [
            {
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "pg_id": 0,
                "process_group": ["0", "default_pg"],
                "profiling_name": f"{backend}:{name}",
                "record_id": number,
                "retired": number <= len(operations) - pending,
                "state": "scheduled",
                "input_sizes": [[size]],
                "input_dtypes": ["Float"],
                "time_created_ns": NOW_NS - 400_000_000_000 + number,
            }
            for number, (name, size) in enumerate(operations, start=1)
        ]
        document = {
            "version": "2.10",
            "entries": entries,
            "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}},
        }
        self._write(f"ranks/{rank:05d}/hang_flight.json", document)
        return self

    def _write(self, name: str, document: Any) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document))


def main_finding(diagnosis: Diagnosis) -> Finding:
    """The finding of the verdict, which stands first."""
    assert diagnosis.findings[0].rule == diagnosis.verdict.rule
    return diagnosis.findings[0]
