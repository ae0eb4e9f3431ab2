"""Jobs of real ranks under ``ddpdoctor run --on-hang kill`` to which things happen while they run, and what they see of it.

Nothing here knows how ddpdoctor finds out that a job hangs: only its command line, its output and its documents.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.analysis import analyze
from tests.hook.recording import JOBS, TORCHRUN, forked

from .launched import DDPDOCTOR_RUN, clean_environment, command_of, descendants, kill

SLOW_JOB = str(JOBS / "slow_ddp.py")
SAID = "the job seems to hang"
SLOW_S = 20.0


@dataclass
class Watched:
    """A job that runs, in ``folder``, where its ranks leave their marks."""

    folder: Path
    run: Path
    process: subprocess.Popen[str]
    keyboard: Callable[[str], None]
    out: list[str] = field(default_factory=list)
    err: list[tuple[float, str]] = field(default_factory=list)
    """Lines of stderr, and when each came."""
    ended_s: float = 0.0
    readers: list[threading.Thread] = field(default_factory=list)

    def wait(self, found: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Until ``found`` says so; None if the job ends before."""
        ends_s = time.time() + seconds
        while not (value := found()):
            if self.process.poll() is not None:
                return None
            assert time.time() < ends_s, self.stderr
            time.sleep(0.05)
        return value

    def mark(self, name: str, rank: int = 0) -> int:
        """The process id of a rank that has left this mark; 0 if the job ended before it did."""
        path = self.folder / f"{name}.{rank}"
        return int(path.readlink().name) if self.wait(path.is_symlink) else 0

    def when(self, name: str, rank: int = 0) -> float | None:
        path = self.folder / f"{name}.{rank}"
        return path.lstat().st_mtime if path.is_symlink() else None

    def said_s(self) -> float | None:
        """When it was first said to hang."""
        return next((when for when, line in self.err if SAID in line), None)

    @property
    def stderr(self) -> str:
        return "".join(line for _, line in self.err)

    def finish(self, seconds: float = 300.0) -> int:
        code = self.process.wait(seconds)
        self.ended_s = time.time()
        for reader in self.readers:
            reader.join(20)
        return code


def _read(stream: Any, into: Callable[[str], object]) -> threading.Thread:
    def reading() -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in stream:
                into(line)

    thread = threading.Thread(target=reading, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def watched(
    tmp: Path,
    command: list[str],
    limit_s: float,
    environment: dict[str, str],
    before: tuple[str, ...] = (),
    out: str = "run",
    terminal: bool = False,
) -> Iterator[Watched]:
    """``before`` ddpdoctor run ... command; with the block everything below it ends, as far as it still runs."""
    options = ["--hang-after", f"{limit_s:g}", "--on-hang", "kill", "--no-profile"]
    master, slave = pty.openpty() if terminal else (-1, subprocess.PIPE)
    process = subprocess.Popen(
        [*before, *DDPDOCTOR_RUN, "--out", out, *options, "--", *command],
        cwd=tmp,
        env=clean_environment(**environment),
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def keyboard(text: str) -> None:
        if terminal:
            os.write(master, text.encode())
        else:
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.flush()

    job = Watched(tmp, tmp / out, process, keyboard)
    job.readers = [
        _read(process.stdout, job.out.append),
        _read(process.stderr, lambda line: job.err.append((time.time(), line))),
    ]
    family: list[int] = []
    try:
        yield job
    finally:
        family = [process.pid, *descendants(process.pid)] if process.poll() is None else []
        kill([*family, *ranks_of(tmp)])
        process.wait()
        if terminal:
            os.close(master)
            os.close(slave)


def ranks_of(folder: Path) -> list[int]:
    """Processes in whose working directory this is, whoever their parent is by now."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == folder and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def helpers(job: Watched) -> list[int]:
    """What ddpdoctor runs beside the job."""
    own = command_of(job.process.pid)
    return [pid for pid in descendants(job.process.pid) if command_of(pid) == own]


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def hidden_call(pid: int) -> Iterator[None]:
    """The kernel does not show other processes the system call of ``pid``, as where Yama lets only ancestors trace; skips the test where
    that cannot be arranged."""
    file = f"/proc/{pid}/syscall"
    mount = ["mount", "--bind", "/dev/null", file]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", file], check=False, capture_output=True)


FREEZERS = (
    (Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
    (Path("/sys/fs/cgroup/unified"), "cgroup.freeze", "1", "0"),
    (Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0"),
)


@contextlib.contextmanager
def frozen(pids: list[int], version: int) -> Iterator[None]:
    """In a control group that is frozen; skips the test where none can be made."""
    for root, name, freeze, thaw in FREEZERS[:1] if version == 1 else FREEZERS[1:]:
        group = root / f"ddpdoctor-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
        if not (group / name).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
            (group / name).write_text(freeze)
            yield
        finally:
            (group / name).write_text(thaw)
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (root / "cgroup.procs").write_text(pid)
            time.sleep(0.2)
            group.rmdir()
        return
    pytest.skip("no control group can be frozen here")


@contextlib.contextmanager
def slow_disk(pid: int, folder: Path, bytes_per_s: int) -> Iterator[None]:
    """One from which ``pid`` reads slowly what is not in memory; skips the test where none can be had."""
    group = Path(f"/sys/fs/cgroup/blkio/ddpdoctor-test-{os.getpid()}")
    device = os.stat(folder).st_dev
    try:
        group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made that reads slowly: {error}")
    try:
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(left)
        time.sleep(0.2)
        group.rmdir()


@contextlib.contextmanager
def small_storage(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> None:
    with contextlib.suppress(OSError), open(place / "of others", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def unchangeable(place: Path) -> Iterator[None]:
    """Nobody, not even root, can make, change or remove a file there meanwhile; what is open stays open."""
    if not shutil.which("chattr") or subprocess.run(["chattr", "-R", "+i", place], check=False).returncode:
        pytest.skip("needs root and chattr")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-R", "-i", place], check=True)


class _Trickle(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(16384))
                time.sleep(0.1)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def slow_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Trickle)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def slow_pipe(path: Path, seconds: float) -> Iterator[str]:
    """Gives whoever opens it 100 kB five times a second, for so long."""
    os.mkfifo(path)

    def feeding() -> None:
        with contextlib.suppress(OSError), open(path, "wb", buffering=0) as pipe:
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                pipe.write(bytes(100_000))
                time.sleep(0.2)

    thread = threading.Thread(target=feeding, daemon=True)
    thread.start()
    yield str(path)
    with contextlib.suppress(OSError):  # frees a feeder to whom nobody came
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    thread.join(5)


def cold_file(path: Path, size: int) -> Path:
    """That is on the disk and not in memory."""
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def stalls(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in run.glob("hosts/*/stall.json")]


def hang_findings(run: Path) -> list[str]:
    return [found.rule for found in analyze([str(run)]).findings if found.rule.startswith("hang/")]


def forked_job(how: str, ranks: int, *options: str) -> list[str]:
    return forked(SLOW_JOB, "--how", how, *options, ranks=ranks)


def torchrun_job(how: str, ranks: int, *options: str) -> list[str]:
    return [*TORCHRUN, str(ranks), SLOW_JOB, "--how", how, *options]
