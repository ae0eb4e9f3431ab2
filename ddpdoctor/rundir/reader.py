"""Reading a run directory: which ranks there are, and which recording of each belongs to the run under
analysis."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Iterator

from .files import read_json, read_json_lines
from .layout import (
    FLIGHT_FILE,
    MANIFEST_FILE,
    RANK_FILE,
    SAMPLES_FILE,
    STEPS_FILE,
    TELEMETRY_FILE,
    TRACE_FILE,
    parse_rank_directory,
)


@dataclass(frozen=True)
class RankRecord:
    """One recording of one rank."""

    path: str
    rank: int
    info: dict[str, Any]
    """What rank.json says; {} where it is missing."""

    @property
    def host(self) -> str:
        """Host name, "" where unknown."""
        return str(self.info.get("host") or "")

    @property
    def attempt(self) -> int:
        """Restart count of the elastic launcher, 0 for the first."""
        return int(self.info.get("attempt") or 0)

    @property
    def trace(self) -> str | None:
        """Path of the profiler window, None where there is none."""
        return self._file(TRACE_FILE)

    @property
    def flight(self) -> str | None:
        """Path of the flight recorder's dump, None where there is none."""
        return self._file(FLIGHT_FILE)

    def steps(self, notes: list[str]) -> Iterator[dict[str, Any]]:
        """Lines of steps.jsonl: records with "where" (source lines) and with "step"."""
        return read_json_lines(os.path.join(self.path, STEPS_FILE), notes)

    def samples(self, notes: list[str]) -> Iterator[dict[str, Any]]:
        """Lines of samples.jsonl."""
        return read_json_lines(os.path.join(self.path, SAMPLES_FILE), notes)

    def _file(self, name: str) -> str | None:
        path = os.path.join(self.path, name)
        return path if os.path.isfile(path) else None

    @property
    def recorded_bytes(self) -> int:
        """Size of the step log, by which recordings of the same rank are weighed."""
        try:
            return os.path.getsize(os.path.join(self.path, STEPS_FILE))
        except OSError:
            return 0


@dataclass(frozen=True)
class RunDirectory:
    """A recorded run. ``ranks`` holds one recording of each rank: that of the attempt which recorded most."""

    path: str
    manifest: dict[str, Any]
    ranks: list[RankRecord]
    telemetry: dict[str, str]
    """Path of telemetry.jsonl by host."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: str) -> RunDirectory:
        """Read the manifest and the ranks' own descriptions. Missing or broken parts become ``notes``."""
        notes: list[str] = []
        manifest = read_json(os.path.join(path, MANIFEST_FILE), notes) or {}
        records = _read_ranks(os.path.join(path, "ranks"), notes)
        return cls(path, manifest, _choose(records, notes), _telemetry(os.path.join(path, "hosts")), notes)


def _read_ranks(ranks: str, notes: list[str]) -> list[RankRecord]:
    records = []
    try:
        names = sorted(os.listdir(ranks))
    except OSError:
        return []
    for name in names:
        parsed = parse_rank_directory(name)
        if parsed is None:
            continue
        path = os.path.join(ranks, name)
        records.append(RankRecord(path, parsed[0], read_json(os.path.join(path, RANK_FILE), notes) or {}))
    return records


def _choose(records: list[RankRecord], notes: list[str]) -> list[RankRecord]:
    """One recording per rank: the job (run id, attempt, world size) with most steps recorded, the others told
    in a note."""
    jobs: dict[tuple[str, int, int], list[RankRecord]] = {}
    for record in records:
        key = (str(record.info.get("job_id") or ""), record.attempt, int(record.info.get("world_size") or 0))
        jobs.setdefault(key, []).append(record)
    if not jobs:
        return []
    chosen_key = max(jobs, key=lambda key: (sum(r.recorded_bytes for r in jobs[key]), key[1]))
    best: dict[int, RankRecord] = {}
    for record in jobs[chosen_key]:
        kept = best.get(record.rank)
        if kept is None or record.recorded_bytes > kept.recorded_bytes:
            best[record.rank] = record
    left_out = len(records) - len(best)
    if left_out:
        notes.append(
            f"{left_out} other recording{'s' if left_out > 1 else ''} in this run (restarted attempts, or other jobs started by "
            "the same command) left out: the one with most steps is analysed."
        )
    return [best[rank] for rank in sorted(best)]


def _telemetry(hosts: str) -> dict[str, str]:
    found = {}
    if os.path.isdir(hosts):
        for host in sorted(os.listdir(hosts)):
            path = os.path.join(hosts, host, TELEMETRY_FILE)
            if os.path.isfile(path):
                found[host] = path
    return found
