"""Finds the attempts of a run and the starts of a job. An elastic launcher restarts all ranks when one dies, a command may start
several jobs in sequence, and a scheduler may start the job again, each time with a new run directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reader import RankRecord, RunDirectory

_SLURM_RESTART = re.compile(r"\.r\d+$")
"""Suffix of the id of a job that Slurm has requeued."""


@dataclass(frozen=True)
class Attempt:
    """The recordings of one attempt, at most one per rank."""

    ranks: list[RankRecord]

    @property
    def started_ns(self) -> int | None:
        """When the first of its ranks joined the process group, epoch ns; None if unknown."""
        starts = [record.info.get("started_ns") for record in self.ranks]
        return min((start for start in starts if isinstance(start, int)), default=None)

    @property
    def restarts(self) -> int:
        """How often its launcher had restarted the ranks before it; with several hosts, the largest count."""
        return max((record.attempt for record in self.ranks), default=0)

    @property
    def job_id(self) -> str:
        """The launcher's id of the job; "" if unknown."""
        return next((record.attempt_key[0] for record in self.ranks), "")

    @property
    def steps(self) -> int:
        """Number of steps that it took: the largest of its ranks' numbers."""
        return max((record.steps for record in self.ranks), default=0)

    @property
    def recorded_bytes(self) -> int:
        """Total bytes of its step logs."""
        return sum(record.recorded_bytes for record in self.ranks)


_Ranks = dict[int, "RankRecord"]


def attempts_of(recordings: Sequence[RankRecord]) -> list[Attempt]:
    """Group the ``recordings`` of a run into attempts, in the order in which they started; [] if no recording identifies its
    attempt.

    Recordings of one attempt have the same job id, restart count and world size. If several are of one process, the longest counts.
    A recording of another process of the same rank belongs to another attempt, because a launcher does not count restarts caused by
    another host. A recording without this information counts with those that have its repeat number.
    """
    found: dict[tuple[str, int, int], _Ranks] = {}
    further: list[RankRecord] = []
    for record in sorted(filter(_is_described, recordings), key=_started_ns):
        ranks = found.setdefault(record.attempt_key, {})
        kept = ranks.setdefault(record.rank, record)
        if kept.process != record.process:
            further.append(record)
        elif record.recorded_bytes > kept.recorded_bytes:
            ranks[record.rank] = record
    attempts = list(found.values())
    for record in further:
        _nearest_attempt(record, attempts)[record.rank] = record
    attempts.sort(key=lambda ranks: min(map(_started_ns, ranks.values())))
    for record in recordings:
        if not _is_described(record):
            same = (ranks for ranks in attempts if any(r.repeat == record.repeat for r in ranks.values()))
            own = next((ranks for ranks in same if record.rank not in ranks), None)
            if own is not None:
                own[record.rank] = record
    return [Attempt([ranks[rank] for rank in sorted(ranks)]) for ranks in attempts]


def _nearest_attempt(record: RankRecord, attempts: list[_Ranks]) -> _Ranks:
    """The attempt of the same job and world size, without this rank, that started nearest to ``record``; a new one if there is
    none."""

    def distance_ns(ranks: _Ranks) -> int:
        return min(abs(_started_ns(record) - _started_ns(each)) for each in ranks.values())

    fitting = [
        ranks for ranks in attempts if record.rank not in ranks and _are_same_job(ranks.values(), record)
    ]
    if not fitting:
        attempts.append({})
        return attempts[-1]
    return min(fitting, key=distance_ns)


def _are_same_job(records: Iterable[RankRecord], record: RankRecord) -> bool:
    return all(each.attempt_key[::2] == record.attempt_key[::2] for each in records)


def _is_described(record: RankRecord) -> bool:
    # The host's name may have been taken from the other ranks.
    return not record.info.keys() <= {"host"}


def _started_ns(record: RankRecord) -> int:
    return int(record.info.get("started_ns") or 0)


def starts_of(runs: Sequence[RunDirectory]) -> list[list[RunDirectory]]:
    """Group the ``runs`` by start of their job, in order. A scheduler or user may start a job again after its end, into new run
    directories.

    Returns a single list if they are not known to be such starts: run directories of the hosts of one start, or of different jobs.
    A start has one recording of each rank and begins after the end of the previous one. Both have the same commands and working
    directories, or the same Slurm job id. With the commands alone, the previous one must not have ended with exit code 0: a
    finished job is not continued.
    """
    starts: list[list[RunDirectory]] = []
    for run in sorted(runs, key=_launched_ns):
        if not starts or _ranks_of([run]) & _ranks_of(starts[-1]):
            starts.append([])
        starts[-1].append(run)
    if len(starts) > 1 and all(_continues(new, old) for old, new in zip(starts, starts[1:])):
        return starts
    return [list(runs)]


def _continues(new: Sequence[RunDirectory], old: Sequence[RunDirectory]) -> bool:
    """Whether the runs ``new`` are the next start of the job of ``old``."""
    from .liveness import is_running

    ends = [run.manifest.get("ended_ns") for run in old]
    if min(map(_launched_ns, new)) < max((end for end in ends if isinstance(end, int)), default=1):
        return False
    if any(is_running(run.manifest) for run in old):
        return False
    ids, before = ({_slurm_job(run) for run in runs} for runs in (new, old))
    if len(ids | before) == 1 and ids != {""}:
        return True
    commands, earlier = ({_launch_command(run) for run in runs} for runs in (new, old))
    return (
        commands == earlier and None not in earlier and any(run.manifest.get("exit_code") != 0 for run in old)
    )


def _launch_command(run: RunDirectory) -> tuple[str, ...] | None:
    """Working directory and command of a launcher; None if no command is known. Commands differ between hosts in ``--node-rank``."""
    command = run.manifest.get("command")
    return (str(run.manifest.get("cwd")), *map(str, command)) if command else None


def _slurm_job(run: RunDirectory) -> str:
    job = str(run.manifest.get("job_id") or "")
    return _SLURM_RESTART.sub("", job) if job.startswith("slurm-") else ""


def _launched_ns(run: RunDirectory) -> int:
    return int(run.manifest.get("started_ns") or 0)


def _ranks_of(runs: Sequence[RunDirectory]) -> set[int]:
    return {record.rank for run in runs for record in run.recordings}
