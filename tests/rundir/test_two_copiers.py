"""Nothing that a rank recorded is lost or doubled where two copy at once, or where the rank writes while it is copied."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.rundir import ENDING_FILE, RANK_FILE, STEPS_FILE, draining, handover, layout
from ddpdoctor.rundir.draining import BusyError, drain, recover
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.launch.launched import make_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    made = make_run(tmp_path / "run")
    yield made
    shutil.rmtree(make_spool_root(str(made)))


def opened(run: Path) -> Spool:
    return Spool(make_spool_root(str(run)), 0, str(run))


def lines(run: Path) -> list[bytes]:
    return (run / "ranks" / "00000" / STEPS_FILE).read_bytes().splitlines()


def test_a_rank_has_one_folder_where_a_reader_looked_before_its_writer_had_made_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``watch`` on a job that starts: it lists the spools, and waits while the rank copies for the first time."""
    spool = opened(run)
    spool.write(STEPS_FILE, b'{"step":0}\n')
    listed = draining.spools_of

    def slowly(path: str) -> list[tuple[str, str]]:
        found = listed(path)
        assert [os.path.basename(target) for _, target in found] == ["ranks"]
        drain(spool.directory)
        return found

    monkeypatch.setattr(draining, "spools_of", slowly)
    assert recover(str(run)) == []
    spool.write(STEPS_FILE, b'{"step":1}\n')
    drain(spool.directory, remove=True)
    assert [folder.name for folder in (run / "ranks").iterdir()] == ["00000"]
    assert len(lines(run)) == 2


def test_two_threads_of_a_process_do_not_copy_the_same_lines(run: Path) -> None:
    """As the two of ``watch``: a record lock keeps processes apart only."""
    spool = opened(run)
    entered, go_on = threading.Event(), threading.Event()

    def beat() -> None:
        entered.set()
        assert go_on.wait(30)

    spool.write(STEPS_FILE, b'{"step":0}\n')
    first = threading.Thread(target=drain, args=(spool.directory,), kwargs={"beat": beat})
    first.start()
    assert entered.wait(30)
    spool.write(STEPS_FILE, b'{"step":1}\n')
    with pytest.raises(BusyError, match="another thread"):
        drain(spool.directory, deadline_s=time.monotonic())
    # Whoever was refused has not given the lock back to other processes.
    child = os.fork()
    if child == 0:
        try:
            drain(spool.directory, deadline_s=time.monotonic())
        except BusyError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    go_on.set()
    first.join(30)
    drain(spool.directory)
    assert lines(run) == [b'{"step":0}', b'{"step":1}']
    spool.close()


@pytest.mark.parametrize("name", [RANK_FILE, ENDING_FILE])
def test_a_document_that_is_replaced_while_it_is_copied_is_copied_again(
    run: Path, monkeypatch, name: str
) -> None:
    """The storage of the run directory takes its time, and the rank ends meanwhile: "raising", then "exception"."""
    spool = opened(run)
    spool.keep_document(name, {"how": "raising"})
    real = handover.replace_file

    def slow(target: str, inside: int | None, data: bytes, mode: int = 0o600) -> None:
        real(target, inside, data, mode)
        if target == name and b"raising" in data:
            spool.keep_document(name, {"how": "exception"})

    with monkeypatch.context() as storage:
        storage.setattr(handover, "replace_file", slow)
        drain(spool.directory)
    drain(spool.directory)
    assert json.loads((run / "ranks" / "00000" / name).read_text())["how"] == "exception"
    spool.close()


def test_a_document_that_could_not_be_copied_waits(run: Path, monkeypatch) -> None:
    spool, place = opened(run), run / "ranks" / "00000"
    for name in (ENDING_FILE, RANK_FILE):
        spool.keep_document(name, {"how": "exception"})

    real = handover.replace_file

    def full(name: str, *where: Any, **more: Any) -> None:
        if name != layout.CARRIED_FILE:
            raise OSError(28, "No space left on device")
        real(name, *where, **more)

    with monkeypatch.context() as storage:
        storage.setattr(handover, "replace_file", full)
        with pytest.raises(OSError, match="No space"):
            drain(spool.directory)
    assert (Path(spool.directory) / ENDING_FILE).exists()
    drain(spool.directory)
    assert json.loads((place / ENDING_FILE).read_text()) == {"how": "exception"}
    (trouble,) = json.loads((place / RANK_FILE).read_text())["hook"]["errors"]
    assert "could not be written" in trouble
    spool.close()


@pytest.mark.parametrize("newer", [True, False])
def test_what_a_copy_that_was_killed_left_is_copied_unless_there_is_newer(run: Path, newer: bool) -> None:
    spool = opened(run)
    spool.keep_document(ENDING_FILE, {"how": "raising"})
    os.rename(Path(spool.directory) / ENDING_FILE, Path(spool.directory) / f"{ENDING_FILE}{layout.ASIDE}")
    if newer:
        spool.keep_document(ENDING_FILE, {"how": "exception"})
    drain(spool.directory)
    found = json.loads((run / "ranks" / "00000" / ENDING_FILE).read_text())["how"]
    assert found == ("exception" if newer else "raising")
    assert not (Path(spool.directory) / f"{ENDING_FILE}{layout.ASIDE}").exists()
    spool.close()
