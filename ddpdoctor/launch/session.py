"""One recorded run from its first to its last moment: ``ddpdoctor run`` without its words."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddpdoctor
from ddpdoctor.launch.child import Child, CommandNotStartedError, ExitStatus
from ddpdoctor.launch.directory import Launch, open_run
from ddpdoctor.launch.environment import LAUNCHER_VARIABLE, child_environment
from ddpdoctor.launch.identity import JobIdentity, default_run_name, job_identity
from ddpdoctor.launch.leftovers import (
    HostRanks,
    clear_spools_of_earlier_runs,
    drain_spools,
    drain_stale_spools,
    end_orphaned_ranks,
)
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.launch.privacy import mask_command
from ddpdoctor.launch.watch import HostWatch
from ddpdoctor.rundir import RUN_SCHEMA, make_spool_root, new_run_id
from ddpdoctor.rundir.privacy import mask_text, recorded_environment

_OTHERS_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    status: ExitStatus
    run: Path | None = None
    """None where nothing was recorded, or could be."""
    owner: bool = False
    """Whether this launcher is the one to analyse the run."""
    recorded_ranks: int = 0
    interrupted: bool = False
    """Whether somebody asked the launcher to end after its job had ended."""
    notes: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    """What could not be copied to the run directory, and where it is; for the user, and in no file, for it may be mended
    later."""


def run_job(
    command: Sequence[str],
    options: RunOptions,
    environment: Mapping[str, str] | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> Outcome:
    """Run ``command`` with the recording switched on and wait for its end.

    For the main thread, before any other is started.

    ``environment`` is the job's (default: ours). Raises DdpDoctorError before the job is started where
    ``options.out`` must not be written to. Whatever else fails on our side costs the recording, never the
    job: it is said through ``warn`` and in ``notes``.
    """
    base = dict(os.environ if environment is None else environment)
    identity = job_identity(base)
    manifest = _manifest(command, options, base, identity)
    launch = None
    try:
        launch = open_run(options.out, default_run_name(command, identity), identity, manifest)
        recording = _Recording(launch, options, base)
    except OSError as error:
        if launch is not None:
            launch.withdraw()
        warn(
            f"nothing is recorded and the job runs alone, because the run directory cannot be made: {error}."
        )
        return _run_unrecorded(command, base)
    return recording.run(command, warn)


def _run_unrecorded(command: Sequence[str], environment: dict[str, str]) -> Outcome:
    try:
        child = Child(command, environment)
    except CommandNotStartedError as error:
        return Outcome(ExitStatus(error.exit_code, None), notes=[str(error)])
    status = child.wait()
    return Outcome(status, interrupted=child.close())


class _Recording:
    """A run directory being filled."""

    def __init__(self, launch: Launch, options: RunOptions, base: dict[str, str]) -> None:
        """Raises OSError."""
        self.launch, self.options = launch, options
        self.ranks = HostRanks(launch.run, launch.host)
        self.watch = HostWatch(launch.run, launch.host, self.ranks, options)
        self.spool = Path(make_spool_root(str(launch.run)))
        if launch.owner:
            clear_spools_of_earlier_runs(launch.run, self.spool)
        self.marker = f"{launch.host}:{launch.record.stem}:{launch.document['started_ns']}"
        self.environment = child_environment(base, launch.run, self.spool, self.marker, options)
        self.notes: list[str] = []
        self.unsaved: list[str] = []
        self.telemetry_notes: list[str] = []
        """For the manifest only: a missing GPU is nothing to tell every user of a CPU job."""

    def run(self, command: Sequence[str], warn: Callable[[str], None]) -> Outcome:
        """Start the command, watch over it, gather what it left."""
        try:
            child = Child(command, self.environment)
        except CommandNotStartedError as error:
            self.launch.withdraw()
            drain_spools(self.spool)
            return Outcome(ExitStatus(error.exit_code, None), notes=[str(error)])
        try:
            self.watch.start(warn)
        except Exception as error:
            self.notes.append(f"No telemetry: {type(error).__name__}: {error}.")
        status = child.wait()
        ended_ns = time.time_ns()
        for stage in (self._settle, self._collect, self._wait_for_others):
            try:
                stage(status)
            except Exception as error:
                self.notes.append(f"The recording may be incomplete: {type(error).__name__}: {error}.")
        recorded = self.ranks.recorded()
        if self.launch.owner and not recorded and self.launch.run.exists():
            self.notes.append(_no_rank(command))
        self.notes = [mask_text(note) for note in self.notes]
        notes = [*self.notes, *map(mask_text, self.telemetry_notes)]
        try:
            self.launch.finish(ended_ns=ended_ns, exit_code=status.code, signal=status.signal, notes=notes)
        except OSError as error:
            self.notes.append(f"{self.launch.run} could not be completed: {error}.")
        interrupted = child.close()
        return Outcome(
            status, self.launch.run, self.launch.owner, recorded, interrupted, self.notes, self.unsaved
        )

    def _settle(self, status: ExitStatus) -> None:
        """Until nobody of this launcher's job writes any more."""
        self.ranks.wait_for_traces()
        if status.signal is not None:
            ended = end_orphaned_ranks(self.ranks, LAUNCHER_VARIABLE, self.marker)
            if ended:
                ids = ", ".join(map(str, ended))
                self.notes.append(
                    f"The command was killed and left ranks behind, which were ended: process {ids}."
                )

    def _collect(self, status: ExitStatus) -> None:
        self.telemetry_notes = self.watch.stop()
        self.unsaved = drain_spools(self.spool)
        drain_stale_spools(self.spool)

    def _wait_for_others(self, status: ExitStatus) -> None:
        """The owner analyses, so it lets the run's other launchers end first, for a while."""
        deadline_s = time.monotonic() + _OTHERS_S
        while self.launch.owner and (others := self.launch.others_running()):
            if time.monotonic() > deadline_s:
                self.notes.append(
                    f"{len(others)} other launcher{'s' if len(others) > 1 else ''} of this run had not ended "
                    f"({', '.join(others[:4])}): `ddpdoctor analyze {self.launch.run}` later sees all of it."
                )
                return
            time.sleep(0.1)


def _no_rank(command: Sequence[str]) -> str:
    return (
        f"no rank was recorded: {command[0]} ended without any Python process in which "
        "torch.distributed.init_process_group returned, or its ranks did not get the command's environment "
        "(PYTHONPATH, DDPDOCTOR_*), or their Python was started with -I, -E or -S, or is older than 3.9."
    )


def _manifest(
    command: Sequence[str], options: RunOptions, environment: Mapping[str, str], identity: JobIdentity
) -> dict[str, Any]:
    return {
        "schema": RUN_SCHEMA,
        "run_id": new_run_id(),
        "ddpdoctor": ddpdoctor.__version__,
        "command": mask_command(command),
        "cwd": mask_text(str(Path.cwd())),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_ns": time.time_ns(),
        "ended_ns": None,
        "exit_code": None,
        "signal": None,
        "job_id": identity.job_id,
        "task": identity.task,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "options": options.as_document(),
        "environment": recorded_environment(environment),
        "hosts": [],
        "notes": [],
    }
