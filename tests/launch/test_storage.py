"""A disk that is full, read-only or gone costs the recording, never the job, and no more than a line of warning."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.launch.leftovers import drain_spools
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.hook.recording import forked
from tests.waiting import until

from .launched import DDPDOCTOR_RUN, TINY, clean_environment, running, spools_below, steps_taken

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, of its own size and manners."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def job(*options: str) -> list[str]:
    return forked(TINY, "--steps", "400", "--step-ms", "5", *options)


def warnings_of(stderr: str) -> list[str]:
    return [
        line for line in stderr.splitlines() if line.startswith("ddpdoctor:") and "the job goes on" in line
    ]


@pytest.mark.torchrun
@needs_root
def test_a_full_disk(tmp_path) -> None:
    with mounted(tmp_path / "small", "size=64k") as disk:
        with running(tmp_path, job(), out=disk / "run") as process:
            out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "took 400 steps\n"), err
        assert 1 <= len(warnings_of(err)) <= 2 and "No space left" in err, err
        assert "Traceback" not in err
        (told,) = [line for line in err.splitlines() if "could not be copied" in line]
        assert "recorded steps of 2 ranks" in told and f"copied to {disk / 'run'} (No space left" in told, (
            told
        )
        assert f"`ddpdoctor analyze {disk / 'run'}` fetches them" in told and "/dev/shm/ddpdoctor-" in told
        assert all(str(disk / "run") in line and "OSError" not in line for line in warnings_of(err)), err
        analyze = [*DDPDOCTOR_RUN[:3], "analyze", str(disk / "run"), "--json", "diagnosis.json"]
        subprocess.run(analyze, cwd=tmp_path, env=clean_environment(), check=True, capture_output=True)
        diagnosis = json.loads((tmp_path / "diagnosis.json").read_text())
        assert diagnosis["steps"]["count"] > 390, "read where they wait"
        assert "could not be copied" in diagnosis["notes"][0], diagnosis["notes"]
        # What did not fit waits in memory-backed storage, and is fetched once there is room.
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        subprocess.run(analyze, cwd=tmp_path, env=clean_environment(), check=True, capture_output=True)
        assert "could not be copied" not in (tmp_path / "diagnosis.json").read_text()
        for rank in (0, 1):
            lines = (disk / "run" / "ranks" / f"0000{rank}" / "steps.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            assert [step["step"] for step in steps if "step" in step] == list(range(400))
            about = json.loads((disk / "run" / "ranks" / f"0000{rank}" / "rank.json").read_text())
            assert about["ended_ns"] and "No space left" in json.dumps(about["window"] | about["hook"])
        assert drain_spools(Path(make_spool_root(str(disk / "run")))) == []


@pytest.mark.torchrun
@needs_root
@pytest.mark.slow
def test_little_room_for_temporary_files(tmp_path) -> None:
    """The uncompressed trace, which may be many times larger than the one kept, goes where it fits, or nowhere."""
    with mounted(tmp_path / "small", "size=256k") as small, mounted(tmp_path / "run", "size=64m") as disk:
        for out, state in ((disk / "first", "saved"), (small / "second", "skipped")):
            # So few steps that all the rest has room there.
            with running(tmp_path, job("--steps", "60"), out=out, TMPDIR=str(small)) as process:
                output, err = process.communicate(timeout=120)
            assert (process.returncode, output) == (0, "took 60 steps\n"), err
            windows = [
                json.loads((out / "ranks" / f"0000{rank}" / "rank.json").read_text())["window"]
                for rank in (0, 1)
            ]
            assert [window["state"] for window in windows] == [state] * 2, windows
            assert not list(small.glob("ddpdoctor-*")) and not list(out.rglob("*.tmp"))
        assert all("MB free" in window["why"] for window in windows)


@pytest.mark.torchrun
@pytest.mark.slow
def test_a_run_directory_removed_while_its_ranks_record(tmp_path) -> None:
    with running(tmp_path, job()) as process:
        until(lambda: steps_taken(tmp_path / "run") > 20, process)
        os.rename(tmp_path / "run", tmp_path / "moved")
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "took 400 steps\n"), err
    assert 1 <= len(warnings_of(err)) <= 2, err
    assert "Traceback" not in err and "could not be" in err
    assert not (tmp_path / "run" / "ranks").exists()
    assert spools_below(tmp_path) == []


@pytest.mark.parametrize(
    ("free_share", "kept_bytes", "reason"),
    [(0.9, 2 * 2**20, "cannot keep up"), (0.1, 2**16, "6.7 of 67 MB are free")],
)
def test_little_memory_backed_storage_is_left_to_the_job(
    tmp_path, monkeypatch, free_share, kept_bytes, reason
) -> None:
    """A container's 64 MB, with a run directory that takes nothing: the job's data loaders need them more."""
    storage = SimpleNamespace(f_frsize=4096, f_blocks=2**14, f_bavail=int(2**14 * free_share))
    monkeypatch.setattr("ddpdoctor.rundir.spool.os.statvfs", lambda path: storage)
    spool = Spool(str(tmp_path / "spool"), 0, str(tmp_path / "run"))
    for _ in range(100):
        spool.write("steps.jsonl", b"x" * 2**16)
    kept = sum(path.stat().st_size for path in Path(spool.directory).glob("steps.jsonl.*"))
    assert kept_bytes <= kept <= kept_bytes + 2**19
    assert spool.dropped == 100 - kept / 2**16 and reason in spool.error
