"""Spools and run directories that vanish and fill at random moments while a rank, without torch, writes and others copy.

Whatever happens: no error reaches the rank, no step is written twice or out of order, and each that is missing was counted by the
rank, is named in a note, or was in a log that the trial itself deleted.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from ddpdoctor.rundir import RUN_SCHEMA, new_run_id
from ddpdoctor.rundir import spool as spool_module
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.host_files import HostLock
from ddpdoctor.rundir.liveness import is_over
from ddpdoctor.rundir.spool import Spool, make_spool_root

STEPS = "steps.jsonl"
ROUNDS = 60
_LOST = re.compile(r"^Steps? (\d+)(?: to (\d+))? w")


class _Storage:
    """Where the spools are: how much of it is free is drawn anew."""

    def __init__(self) -> None:
        self.free_mb = 60.0

    def __call__(self, path: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=int(self.free_mb * 256), f_blocks=64 * 256, f_frsize=4096)


class _Trial:
    def __init__(self, chance: random.Random, place: Path) -> None:
        self.chance, self.place = chance, place
        self.run = place / "run"
        self.run.mkdir(parents=True)
        (self.run / "manifest.json").write_text(
            json.dumps({"schema": RUN_SCHEMA, "run_id": new_run_id(), "ended_ns": None})
        )
        self.storage = _Storage()
        self.root = Path(make_spool_root(str(self.run)))
        self.spool = Spool(str(self.root), 0, str(self.run))
        self.copier_lock = HostLock(str(self.root))
        self.step = 0
        self.excused: set[int] = set()
        self.lock = threading.Lock()
        """Of what the trial itself does to the run directory: not while somebody copies."""
        self.rank_thread = threading.Lock()
        """A rank restores its spool in one thread; a trial copies in two."""

    def write(self) -> None:
        size = self.chance.choice((0, 100, 100, 4000))
        for _ in range(self.chance.choice((1, 10, 300))):
            line = b'{"step":%d,"t":[1,2],"x":"%s"}\n' % (self.step, b"x" * size)
            if not self.spool.write(STEPS, line):
                self.excused.add(self.step)
            self.step += 1

    def copy(self) -> None:
        """As the thread of the rank and the process beside the launcher do, once a second."""
        try:
            with self.rank_thread:
                self.spool.restore()
                self.spool.keep("rank.json", b'{"rank":0}')
        except OSError:
            pass  # there is no room, or it was removed this very moment; both are looked at again
        with self.lock:
            self.copier_lock.take()
            try:
                drain(self.spool.directory, remove=is_over(self.spool.directory))
            except OSError:
                pass

    def remove(self) -> None:
        spool = Path(self.spool.directory)
        what = self.chance.randrange(4)
        if what == 0:
            shutil.rmtree(self.root, ignore_errors=True)
        elif what == 1:
            shutil.rmtree(spool, ignore_errors=True)
        else:
            for path in self.chance.sample(found := _listed(spool), self.chance.randint(0, len(found))):
                path.unlink(missing_ok=True)

    def fill(self) -> None:
        self.storage.free_mb = self.chance.choice((0.0, 2.0, 6.0, 60.0))
        if self.chance.random() < 0.5:
            self.spool._no_room_until_s.clear()

    def remove_log(self) -> None:
        with self.lock:
            for log in self.run.glob(f"ranks/*/{STEPS}"):
                self.excused.update(step for step, _ in _read(log) if step is not None)
                log.unlink()

    def move_run(self) -> None:
        with self.lock:
            self.run.rename(self.run.with_name("moved"))
        self.write()
        self.copy()
        with self.lock:
            self.run.with_name("moved").rename(self.run)

    def end(self) -> None:
        self.storage.free_mb = 60.0
        self.spool.restore()
        self.spool.close()
        drain(self.spool.directory)
        self.copier_lock.release()

    def check(self) -> None:
        found = set(self.excused)
        for log in sorted(self.run.glob(f"ranks/*/{STEPS}")):
            last = -1
            for step, note in _read(log):
                if step is not None:
                    assert step > last, f"{log}: step {step} after {last}"
                    last = step
                    found.add(step)
                if note and (lost := _LOST.match(note)):
                    found.update(range(int(lost[1]), int(lost[2] or lost[1]) + 1))
        missing = sorted({*range(self.step)} - found)
        assert not missing, f"nobody says what became of steps {missing[:5]}... ({len(missing)})"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(log: Path) -> list[tuple[int | None, str]]:
    data = log.read_bytes()
    assert not data or data.endswith(b"\n")
    lines = [json.loads(line) for line in data.splitlines()]
    return [(line.get("step"), line.get("note", "")) for line in lines]


def trial(chance: random.Random, place: Path) -> None:
    """One, in the new folder ``place``; removed afterwards. Raises what went wrong."""
    (place / "storage").mkdir(parents=True)
    with mock.patch.object(spool_module, "_base", lambda: str(place / "storage")):
        tried = _Trial(chance, place)
        with mock.patch.object(spool_module.os, "statvfs", tried.storage):
            _play(tried, chance.random() < 0.5)
            tried.end()
        tried.check()
    shutil.rmtree(place)


def _play(tried: _Trial, beside: bool) -> None:
    """``beside``: a thread copies, as it would; otherwise the moments are drawn, too."""
    tried.copy()  # a rank whose folder is not known yet begins another recording
    acts: list[Callable[[], None]] = [tried.write] * 8 + [
        tried.remove,
        tried.fill,
        tried.remove_log,
        tried.move_run,
    ]
    acts += [] if beside else [tried.copy] * 4
    over, failed = threading.Event(), list[BaseException]()

    def copying() -> None:
        try:
            while not over.wait(0.001):
                tried.copy()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=copying)
    if beside:
        thread.start()
    try:
        for _ in range(ROUNDS):
            tried.chance.choice(acts)()
            if beside:
                time.sleep(tried.chance.random() * 0.002)
    finally:
        over.set()
        if beside:
            thread.join()
    if failed:
        raise failed[0]


def failures(seed: int, trials: int, place: Path) -> list[str]:
    """What went wrong, with the numbers that repeat it."""
    found = []
    for number in range(trials):
        try:
            trial(random.Random(f"{seed}-{number}"), place / str(number))
        except Exception as error:
            found.append(f"spools {seed}-{number}: {type(error).__name__}: {error}")
    return found
