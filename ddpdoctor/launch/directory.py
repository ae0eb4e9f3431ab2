"""The run directory of a job and its manifest. The job's first launcher creates it, the others join it."""

from __future__ import annotations

import errno
import os
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddpdoctor
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.rundir import layout
from ddpdoctor.rundir.files import read_json, write_json
from ddpdoctor.rundir.liveness import boot_id, boot_time_s, is_running, pid_namespace, started
from ddpdoctor.rundir.owned import (
    UntrustedFileError,
    encoded,
    folder,
    is_own,
    is_own_folder,
    make_private_folder,
    replace_file,
    resolve_own_links,
)
from ddpdoctor.rundir.privacy import mask_command, mask_text, recorded_environment

_TASK_VARIABLES = (
    *("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    *("PMI_RANK", "MV2_COMM_WORLD_RANK", "RANK"),
)


@dataclass(frozen=True)
class JobIdentity:
    """Identity of a job. Except for ``task`` it is the same for all launchers started by one ``srun``, ``mpiexec`` or
    ``torchrun --no-python``.
    """

    job_id: str | None
    """None if this launcher was not started once per rank."""
    task: int | None
    """Number of this launcher among those of the job."""


def job_identity(environment: Mapping[str, str]) -> JobIdentity:
    """Identify the job by the scheduler's variables.

    Inside ``sbatch`` but outside ``srun`` there is no Slurm step, so no job id.
    """
    task = next((int(environment[n]) for n in _TASK_VARIABLES if environment.get(n, "").isdecimal()), None)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        restart = environment.get("SLURM_RESTART_COUNT", "0")
        job = f"slurm-{environment.get('SLURM_JOB_ID', '0')}.{environment['SLURM_STEP_ID']}"
        return JobIdentity(job if restart == "0" else f"{job}.r{restart}", task)
    if namespace := environment.get("PMIX_NAMESPACE"):
        return JobIdentity("mpi-" + re.sub(r"[^A-Za-z0-9._-]", "_", namespace), task)
    if task is None or "SLURM_PROCID" in environment:
        return JobIdentity(None, None)
    return JobIdentity(f"{_stamp(_parent_started_s())}-p{os.getppid()}", task)


def default_run_name(command: Sequence[str], identity: JobIdentity) -> str:
    """``<job id>-<script>``, which all launchers of a job share; ``<UTC time>-<script>`` without a job id."""
    return f"{identity.job_id or _stamp(time.time())}-{script_stem(command)}"


def script_stem(command: Sequence[str]) -> str:
    """Short name of a job: its script or module, else its program."""
    name = next((Path(a).stem for a in command if a.endswith(".py") and not a.startswith("-")), None)
    if name is None:
        modules = [b for a, b in zip(command, command[1:]) if a == "-m" and not b.startswith("torch.")]
        name = modules[0] if modules else Path(command[0]).stem
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60].strip(".") or "job"


def _stamp(epoch_s: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch_s))


def _parent_started_s() -> float:
    """Start of the parent process, epoch seconds. All launchers of a job on this host have the same parent."""
    ticks, booted_s = started(os.getppid()), boot_time_s()
    if ticks is None or booted_s is None:
        return time.time()
    return booted_s + ticks / os.sysconf("SC_CLK_TCK")


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return os.environ.get("PWD", "")


def new_manifest(
    command: Sequence[str], options: RunOptions, environment: Mapping[str, str], identity: JobIdentity
) -> dict[str, Any]:
    """The manifest of a run that begins now. ``environment``: the job's."""
    return {
        "schema": layout.RUN_SCHEMA,
        "run_id": layout.new_run_id(),
        "ddpdoctor": ddpdoctor.__version__,
        "command": mask_command(command),
        "cwd": mask_text(_working_directory()),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
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
        "note_codes": [],
    }


RUNS_FOLDER = "ddpdoctor-runs"
_MANIFEST_S = 2.0
"""Time limit until a manifest is complete, on file systems on which it cannot be created atomically."""
_OWN_ENTRIES = frozenset([layout.MANIFEST_FILE, "hosts", "ranks"])


@dataclass
class Launch:
    """A launcher's membership in a run directory."""

    run: Path
    host: str
    record: Path
    """hosts/<host>/launch-<pid>.json"""
    document: dict[str, Any]
    owner: bool
    """Whether this launcher created the run directory, so that it writes the manifest and analyses the run."""
    _ended: set[Path] = field(default_factory=set)
    """Records of launchers that have ended."""

    def finish(self, **fields: Any) -> None:
        """Write ``fields`` (ended_ns, exit_code, signal, notes, note_codes) into the records. Raises OSError, also if the run was deleted
        and its path now belongs to another run.
        """
        layout.refuse_other_run(str(self.run), self.document.get("run_id"))
        self.document.update(fields)
        with folder(str(self.run), links=True) as run, folder("hosts", run) as hosts:
            if not is_own(run):
                raise UntrustedFileError(errno.EPERM, "it belongs to another user", str(self.run))
            with folder(self.record.parent.name, hosts) as own:
                replace_file(self.record.name, own, encoded(self.document), mode=0o666)
            if self.owner:
                names = sorted(
                    entry.name for entry in os.scandir(hosts) if entry.is_dir(follow_symlinks=False)
                )
                manifest = {**self.document, "hosts": names}
                replace_file(layout.MANIFEST_FILE, run, encoded(manifest), mode=0o666)

    def withdraw(self) -> None:
        """Remove the records of a launcher whose command could not be started, and the run directory if it is then empty."""
        with suppress(OSError):
            self.record.unlink()
            self.record.parent.rmdir()
            if self.owner:
                (self.run / layout.MANIFEST_FILE).unlink()
                (self.run / "hosts").rmdir()
                self.run.rmdir()

    def others_running(self) -> list[str]:
        """``host:pid`` of the run's other launchers that may still run. The record of an ended launcher is not read again."""
        running = []
        for host, record, document in _launches(self.run, excluded=self._ended | {self.record}):
            if document.get("ended_ns") is None and is_running(document) is not False:
                running.append(f"{host}:{document.get('pid')}")
            else:
                self._ended.add(record)
        return running


def open_run(out: Path | None, name: str, identity: JobIdentity, document: dict[str, Any]) -> Launch:
    """Create or join the run directory ``out``, or one called ``name`` below ``ddpdoctor-runs/``.

    ``document``: this launcher's manifest. Raises DdpDoctorError if ``out`` must not be written to, OSError if nothing can be written.
    """
    if out is not None:
        return _create_or_join(out.absolute(), identity, document)
    base = _writable_base()
    for repeat in range(1, 1000):
        path = base / (name if repeat == 1 else f"{name}-{repeat}")
        if identity.job_id is None:
            try:
                path.mkdir()
            except FileExistsError:
                continue
        try:
            return _create_or_join(path, identity, document)
        except DdpDoctorError:
            continue
    raise OSError(f"{base} holds a thousand runs called {name}")


def _writable_base() -> Path:
    """``ddpdoctor-runs`` in the working directory; if that is read-only or deleted, a private folder in the temporary directory."""
    with suppress(OSError):
        base = Path.cwd() / RUNS_FOLDER
        base.mkdir(exist_ok=True)
        if os.access(base, os.W_OK | os.X_OK) and is_own_folder(str(base)):
            return base
    base = Path(tempfile.gettempdir()) / f"{RUNS_FOLDER}-{os.getuid()}"
    try:
        make_private_folder(str(base))
    except UntrustedFileError:
        # A folder of this name belongs to another user.
        return Path(tempfile.mkdtemp(prefix=f"{RUNS_FOLDER}-"))
    return base


def _create_or_join(run: Path, identity: JobIdentity, document: dict[str, Any]) -> Launch:
    if run.exists() and not run.is_dir():
        raise DdpDoctorError(f"{run} is a file; --out needs a directory that does not exist yet.")
    try:
        resolve_own_links(run)
    except OSError as error:
        raise DdpDoctorError(f"{run}: {error.strerror or error}; choose another --out.") from error
    run.mkdir(parents=True, exist_ok=True)
    if not is_own_folder(str(run)):
        raise DdpDoctorError(f"{run} belongs to another user, or all may write to it; choose another --out.")
    foreign = sorted(
        entry.name for entry in run.iterdir() if entry.name not in _OWN_ENTRIES and entry.suffix != ".tmp"
    )
    manifest_path = run / layout.MANIFEST_FILE
    if manifest_path.exists():
        # The manifest.json may belong to a web application.
        is_foreign = not layout.is_run_directory(str(run)) and (
            foreign or read_json(str(manifest_path), []) is not None
        )
        foreign = [layout.MANIFEST_FILE] if is_foreign else []
    elif not foreign and (run / "ranks").exists():
        foreign = ["ranks"]
    if foreign:
        found = foreign[0]
        raise DdpDoctorError(
            f"{run} is not empty (it holds {found}) and is no run of ddpdoctor; choose another --out."
        )
    host = str(document["host"])
    owner = not manifest_path.exists() and create_exclusively(manifest_path, document)
    if not owner:
        reason = _reason_closed(run, identity)
        if reason:
            raise DdpDoctorError(f"{run} {reason}; choose another --out.")
        document = {**document, "run_id": _run_id_of_owner(run)}
    folder = Path(layout.host_directory(str(run), host))
    folder.mkdir(parents=True, exist_ok=True)
    record = next(
        path for path in _record_names(folder, int(document["pid"])) if create_exclusively(path, document)
    )
    return Launch(run, host, record, document, owner)


def _run_id_of_owner(run: Path) -> str | None:
    """The run's id. Waits up to ``_MANIFEST_S`` until its first launcher has written it."""
    deadline_s = time.monotonic() + _MANIFEST_S
    while read_json(str(run / layout.MANIFEST_FILE), []) is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return layout.run_id(str(run))


def _record_names(folder: Path, pid: int) -> Iterator[Path]:
    yield folder / f"launch-{pid}.json"
    for repeat in range(1, 1000):
        yield folder / f"launch-{pid}.{repeat}.json"
    raise OSError(f"{folder} holds a thousand records of launchers with process id {pid}")


def create_exclusively(path: Path, document: dict[str, Any]) -> bool:
    """Write a new JSON file atomically; False if ``path`` exists. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{document.get('host')}.{os.getpid()}.new.tmp")
    write_json(str(temporary), document)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links. The file is created exclusively, but a reader may see it incomplete.
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        write_json(str(path), document)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _reason_closed(run: Path, identity: JobIdentity) -> str | None:
    """Why a launcher of ``identity`` may not join ``run``; None if it may."""
    manifest = read_json(str(run / layout.MANIFEST_FILE), []) or {}
    ended = manifest.get("ended_ns") is not None
    if not ended and is_running(manifest) is not False:
        # The usual case, in which no launcher needs to read the records of the others.
        return None
    launches = [document for _, _, document in _launches(run)]
    same_job = identity.job_id is not None and any(d.get("job_id") == identity.job_id for d in launches)
    if same_job and identity.task not in [d.get("task") for d in launches]:
        return None
    return "already holds a finished run" if ended else "already holds a run, which was cut off"


def _launches(run: Path, excluded: Container[Path] = ()) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """(host folder's name, path, document) of each launcher's record, without the paths in ``excluded``."""
    for record in sorted((run / "hosts").glob("*/launch-*.json")):
        if record in excluded:
            continue
        document = read_json(str(record), [])
        if document is not None:
            yield record.parent.name, record, document
