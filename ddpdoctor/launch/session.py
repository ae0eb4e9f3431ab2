"""One recorded run from start to end: ``ddpdoctor run`` without its command line."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.hook.environment import (
    DEFAULT_HANG_AFTER_S,
    DEFAULT_PROFILE_STEPS,
    HookOptions,
    job_environment,
)
from ddpdoctor.launch.alone import (
    CommandNotStartedError,
    error_text,
    inherited_environment,
    preparing,
    replace_this_process,
    warn_unrecorded,
)
from ddpdoctor.launch.child import Child, ExitStatus
from ddpdoctor.launch.directory import Launch, default_run_name, job_identity, new_manifest, open_run
from ddpdoctor.launch.hang_monitor import END_S, HangMonitor
from ddpdoctor.launch.helper import Beat, HelperProcess, StorageTimeoutError, run_with_timeout
from ddpdoctor.launch.leftovers import HostRanks, Orphans, clear_spools_of_earlier_runs, drain_spools
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.launch.storage_process import StorageProcess
from ddpdoctor.rundir.handover import clear_raw_folders
from ddpdoctor.rundir.host_files import keep_host_document, read_unjoined, unjoined_files
from ddpdoctor.rundir.layout import ASKED_FILE, ENDS_FILE, STALL_FILE
from ddpdoctor.rundir.liveness import boot_id
from ddpdoctor.rundir.notes import Note, NoteCode
from ddpdoctor.rundir.privacy import mask_text
from ddpdoctor.rundir.sources import note_sources
from ddpdoctor.rundir.spool import make_spool_root
from ddpdoctor.rundir.stops import ASKED_SCHEMA, signal_name

_MOST_NAMED = 8


def ranks_before_init(root: str) -> str:
    """Sentences on ranks that have not joined a process group: whether they had called ``init_process_group``. "" if there are none."""
    asked: dict[int, bool] = {}
    for rank, _, path in unjoined_files(root):
        asked[rank] = asked.get(rank, False) or "joining_ns" in read_unjoined(path).about
    sentences = []
    for has_asked, what in (
        (False, "had not called init_process_group"),
        (True, "waited in init_process_group"),
    ):
        ranks = [rank for rank, has in asked.items() if has is has_asked]
        if ranks:
            more = " ..." if len(ranks) > _MOST_NAMED else ""
            named = ", ".join(map(str, ranks[:_MOST_NAMED]))
            sentences.append(f"Rank{'s' if len(ranks) > 1 else ''} {named}{more} {what}.")
    return " ".join(sentences)


def no_rank_note(program: str, ended_by: int | None, unjoined: str) -> Note:
    """Note on why no rank was recorded. ``ended_by``: the signal that ended ``program``, None if it ended by itself; ``unjoined``: the
    sentences of ``ranks_before_init``."""
    if ended_by is not None:
        name = signal_name(ended_by)
        text = f"the job was ended by {name} before its first step: no rank was recorded, as none had joined its process group."
        return Note(f"{text} {unjoined}".rstrip(), NoteCode.NO_RANK)
    return Note(
        f"no rank was recorded: {program} ended without any Python process in which "
        "torch.distributed.init_process_group returned, or its ranks did not get the command's environment "
        "(PYTHONPATH, DDPDOCTOR_*), or their Python was started with -I, -E or -S, or is older than 3.9.",
        NoteCode.NO_RANK,
    )


_LAUNCHER_VARIABLE = "DDPDOCTOR_LAUNCHER"
"""Environment variable by which a launcher recognises its own ranks: several launchers of a host may record into one run."""
_OTHERS_S = 5.0
_START_S = 10.0
"""Time limit for creating the run directory: automounting a file system takes seconds."""
_ANSWER_S = 2.0
"""Time without progress after which storage counts as not answering, after the job's end."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and what was recorded."""

    status: ExitStatus
    run: Path | None = None
    """None if nothing could be recorded."""
    owner: bool = False
    """Whether this launcher is the one to analyse the run."""
    recorded_ranks: int = 0
    stopped: bool = False
    """Whether it is known how ranks stopped, before or after they joined their process group."""
    interrupted: bool = False
    """Whether the launcher got a signal to end after its job had ended."""
    notes: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    """Sentences on records that could not be copied to the run directory. Not in the manifest, because they may be copied later."""

    @property
    def to_analyze(self) -> Path | None:
        """The run directory if this launcher is to analyse it and anything was recorded, else None."""
        return self.run if self.owner and (self.recorded_ranks or self.stopped) else None


def run_job(
    command: Sequence[str],
    options: RunOptions,
    environment: Mapping[str, str] | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
    diagnose: Callable[[Path], str] | None = None,
) -> Outcome:
    """Run ``command`` with recording enabled and wait for its end. Main thread only, before any other thread starts.

    ``environment``: the job's (default: this process's). ``diagnose`` analyses the run while the job hangs, and returns a sentence for
    the user. Raises DdpDoctorError before the job is started if ``options.out`` must not be written to. After any other error of
    ddpdoctor the job runs, recorded in part or not at all; the error is reported by ``warn`` or in ``notes``.
    """
    base: dict[str, str] | None = None
    try:
        try:
            with preparing("the environment cannot be read"):
                base = inherited_environment() if environment is None else dict(environment)
            recording, child = _start(command, options, base, diagnose)
        except (DdpDoctorError, CommandNotStartedError):
            raise
        except Exception as error:
            warn_unrecorded(error, warn)
            return _run_unrecorded(command, dict(os.environ) if base is None else base)
    except CommandNotStartedError as error:
        return Outcome(ExitStatus(error.exit_code, None), notes=[str(error)])
    return recording.follow(command, child, warn)


def _start(
    command: Sequence[str], options: RunOptions, base: dict[str, str], diagnose: Callable[[Path], str] | None
) -> tuple[_Recording, Child]:
    """Start the job and its recording. Raises DdpDoctorError if ``options.out`` must not be written to, CommandNotStartedError,
    UnpreparedError. After an exception the job does not run, and all files are removed."""
    with preparing("the run cannot be described"):
        identity = job_identity(base)
        manifest = new_manifest(command, options, base, identity)
        name = default_run_name(command, identity)

    def prepare(beat: Beat) -> tuple[Launch, Path]:
        with preparing("the run directory cannot be created", passed=DdpDoctorError):
            launch = open_run(options.out, name, identity, manifest)
        try:
            with preparing("no memory can be had for its ranks' recordings"):
                spool = Path(make_spool_root(str(launch.run)))
                if launch.owner:
                    clear_spools_of_earlier_runs(launch.run, spool)
        except Exception:
            launch.withdraw()
            raise
        return launch, spool

    def remove_files(beat: Beat) -> None:
        """Remove the files of a job that has not started."""
        launch.withdraw()
        drain_spools(spool)

    with preparing("the run directory cannot be created", passed=DdpDoctorError):
        launch, spool = run_with_timeout(prepare, _START_S)
    try:
        with preparing("the recording cannot be prepared"):
            recording = _Recording(launch, spool, options, base, diagnose)
        return recording, Child(command, recording.environment, recording.note_end_request)
    except BaseException:
        with suppress(Exception):
            run_with_timeout(remove_files, _ANSWER_S)
        raise


def _run_unrecorded(command: Sequence[str], environment: dict[str, str]) -> Outcome:
    """Run the job unrecorded, in a child process, because this process may have children that are not the job's. If no process can be
    started, replace this one. Raises CommandNotStartedError."""
    try:
        child = Child(command, environment)
    except CommandNotStartedError:
        raise
    except Exception:
        replace_this_process(command, environment)
    status = child.wait()
    return Outcome(status, interrupted=child.close())


class _Recording:
    """The recording of a running job."""

    def __init__(
        self,
        launch: Launch,
        spool: Path,
        options: RunOptions,
        base: dict[str, str],
        diagnose: Callable[[Path], str] | None,
    ) -> None:
        """``spool``: folder of the ranks' spools on this host."""
        self.launch, self.spool = launch, spool
        self.ranks = HostRanks(launch.run, launch.host)
        kept = launch.run, spool, launch.host, options
        self.storage_process = HelperProcess(
            "storage", lambda orders, writer: StorageProcess(*kept, orders, writer).run()
        )
        own = None if diagnose is None or not launch.owner else partial(diagnose, launch.run)
        watched = spool, launch.host, options, own
        self.hang_monitor = HelperProcess(
            "hang-monitor", lambda orders, writer: HangMonitor(*watched, orders, writer).run()
        )
        self.marker = f"{launch.host}:{launch.record.stem}:{launch.document['started_ns']}"
        asked = HookOptions(
            profile_steps=(options.profile_steps or DEFAULT_PROFILE_STEPS) if options.profile else None,
            max_trace_mb=options.max_trace_mb,
            hang_after_s=DEFAULT_HANG_AFTER_S if options.hang_after_s is None else options.hang_after_s,
        )
        self.environment = job_environment(str(launch.run), str(self.spool), asked, base)
        self.environment[_LAUNCHER_VARIABLE] = self.marker
        self.notes: list[str] = []
        self.unsaved: list[str] = []
        self._first_end_signal: int | None = None
        """The first signal that asked the job to end."""
        self.manifest_notes: list[Note] = []
        """Notes that are not shown to the user, for example that a CPU job has no GPU."""

    def follow(self, command: Sequence[str], child: Child, warn: Callable[[str], None]) -> Outcome:
        """Wait until ``command`` has ended, and complete the recording."""

        def heard(said: dict[str, Any]) -> None:
            """Handle a message of a helper process: a warning, notes, or the hang monitor's order to end the job."""
            if "warn" in said:
                warn(said["warn"])
            if said.get("end_job"):
                child.end()
            self.manifest_notes += [Note(text, NoteCode(code)) for text, code in said.get("notes", [])]

        for process, lost in (
            (self.storage_process, "No telemetry"),
            (self.hang_monitor, "The job is not watched for hangs"),
        ):
            try:
                process.start()
            except Exception as error:
                self.notes.append(f"{lost}: {error}.")
        self.storage_process.listen(heard, _ANSWER_S)
        self.hang_monitor.listen(heard, END_S)
        status = child.wait()
        try:
            recorded, stopped = self._finish(command, status, child)
        except StorageTimeoutError:
            recorded, stopped = 0, False
            self.unsaved.append(
                f"{self.launch.run} does not answer: what has not been copied there yet waits in memory ({self.spool}); "
                f"once it answers, `ddpdoctor analyze {self.launch.run}` fetches it."
            )
        except Exception as error:
            recorded, stopped = 0, False
            self.unsaved.append(f"The recording in {self.launch.run} is incomplete: {error_text(error)}.")
        interrupted = child.close()
        notes = [mask_text(note) for note in self.notes]
        return Outcome(
            status, self.launch.run, self.launch.owner, recorded, stopped, interrupted, notes, self.unsaved
        )

    def note_end_request(self, number: int) -> None:
        """Write to memory at once which signal first asked the job to end: a SIGKILL for all processes may follow."""
        if self._first_end_signal is not None:
            return
        self._first_end_signal = number
        document = {
            "schema": ASKED_SCHEMA,
            "host": self.launch.host,
            "boot": boot_id(),
            "signal": number,
            "at_ns": time.time_ns(),
        }
        with suppress(Exception):  # the memory-backed folder is full or gone
            keep_host_document(str(self.spool), ASKED_FILE, document)

    def _finish(self, command: Sequence[str], status: ExitStatus, child: Child) -> tuple[int, bool]:
        """Complete the recording after the job's end. Returns the number of ranks recorded, and whether it is known how ranks stopped.
        Raises StorageTimeoutError.

        Each stage runs in a helper process, which can be abandoned.
        """
        ended_ns = time.time_ns()
        unjoined = ranks_before_init(str(self.spool))
        with suppress(StorageTimeoutError):  # the ends of the ranks are then not recorded
            self.hang_monitor.end()
        self.storage_process.end()
        self._run_stage(self._wait_for_traces, self.notes)
        if child.is_end_requested or status.signal is not None:
            end_orphans = partial(self._end_orphans, child.was_group_signalled, self._recorded_ranks())
            if not self._run_stage(end_orphans, self.notes):
                self.notes.append("Processes of the job may still run: they could not be looked for.")
        for stage, sentences in ((self._collect, self.unsaved), (self._wait_for_others, self.notes)):
            if not self._run_stage(stage, sentences):
                raise StorageTimeoutError
        self._note_sources()
        # A command that ends because of a signal may return an exit code, as torchrun does.
        ended_by = status.signal or (self._first_end_signal if status.code else None)
        no_rank = no_rank_note(command[0], ended_by, unjoined)
        recorded, stopped, notes = run_with_timeout(
            lambda beat: self._complete(status, ended_ns, no_rank), _ANSWER_S
        )
        self.notes = [*notes, *self.notes]
        return recorded, stopped

    def _complete(self, status: ExitStatus, ended_ns: int, no_rank: Note) -> tuple[int, bool, list[str]]:
        """Complete the manifest. Returns the number of ranks recorded, whether it is known how ranks stopped, and sentences for the user.
        ``no_rank``: the note for a run without either."""
        recorded, said = self.ranks.recorded(), list[str]()
        notes = [Note(sentence) for sentence in self.notes]
        stopped = any(any(self.launch.run.glob(f"hosts/*/{name}")) for name in (STALL_FILE, ENDS_FILE))
        if self.launch.owner and not (recorded or stopped) and self.launch.run.exists():
            notes.insert(0, no_rank)
            said.append(no_rank.text)
        notes += self.manifest_notes
        try:
            self.launch.finish(
                ended_ns=ended_ns,
                exit_code=status.code,
                signal=status.signal,
                notes=[mask_text(note.text) for note in notes],
                note_codes=[note.code.value for note in notes],
            )
        except OSError as error:
            said.append(f"{self.launch.run} could not be completed: {error}.")
        return recorded, stopped, said

    def _run_stage(self, stage: Callable[[Beat], list[str]], sentences: list[str]) -> bool:
        """Run a stage after the job's end in a helper process, and append its result to ``sentences``. False if the storage did not
        answer."""
        try:
            sentences += run_with_timeout(stage, _ANSWER_S)
        except StorageTimeoutError:
            return False
        except Exception as error:
            self.notes.append(f"The recording may be incomplete: {type(error).__name__}: {error}.")
        return True

    def _wait_for_traces(self, beat: Beat) -> list[str]:
        self.ranks.wait_for_traces()
        return []

    def _recorded_ranks(self) -> dict[int, int] | None:
        """Ranks of this host in the run directory, by process id; None if the storage does not answer."""
        try:
            return run_with_timeout(lambda beat: {pid: rank for rank, pid in self.ranks.all()}, _ANSWER_S)
        except Exception:
            return None

    def _end_orphans(self, was_signalled: bool, recorded: Mapping[int, int] | None, beat: Beat) -> list[str]:
        """End processes of this launcher's job that outlived the command."""
        orphans = Orphans(_LAUNCHER_VARIABLE, self.marker, self.spool, recorded)
        return orphans.end(beat, os.getpgrp() if was_signalled else 0).sentences()

    def _collect(self, beat: Beat) -> list[str]:
        unsaved = drain_spools(self.spool, beat, self.launch.run)
        folders = [tempfile.gettempdir(), *map(str, (self.launch.run / "ranks").glob("*"))]
        clear_raw_folders(folders, self.launch.document["run_id"])
        return unsaved

    def _note_sources(self) -> None:
        """Record the ranks' source files, so that the analysis can check whether they changed. If the job's storage is slow or gone, the
        report has no source text."""
        launch = self.launch
        try:
            began_ns = launch.document["started_ns"]
            noted = str(launch.run), launch.host
            run_with_timeout(lambda beat: note_sources(*noted, self.ranks.folders(), began_ns), _ANSWER_S)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            why = "its storage does not answer" if isinstance(error, StorageTimeoutError) else failed
            self.manifest_notes.append(
                Note(f"The report shows no source text: the job's files could not be read ({why}).")
            )

    def _wait_for_others(self, beat: Beat) -> list[str]:
        """Wait up to ``_OTHERS_S`` for the run's other launchers, if this one analyses the run."""
        deadline_s, pause_s = time.monotonic() + _OTHERS_S, 0.1
        while self.launch.owner and (others := self.launch.others_running()):
            if time.monotonic() > deadline_s:
                note = (
                    f"{len(others)} other launcher{'s' if len(others) > 1 else ''} of this run had not ended "
                    f"({', '.join(others[:4])}): `ddpdoctor analyze {self.launch.run}` later sees all of it."
                )
                return [note]
            beat()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1.0)
        return []
