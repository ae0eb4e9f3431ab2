"""A copy of a working directory, with what cannot be copied in it."""

from __future__ import annotations

import os
import shutil

import pytest

from ddpdoctor.experiment import scratch as copies
from ddpdoctor.experiment.scratch import copy_folder


def test_what_lies_in_a_working_directory_goes_along_and_what_cannot_is_told(tmp_path):
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    (here / "data" / "a.bin").write_bytes(b"12")
    (here / "train.py").symlink_to("data/a.bin")
    (here / "gone").symlink_to("nowhere")
    os.mkfifo(here / "pipe")
    run = here / "ddpdoctor-runs" / "one"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    apart = here / "ddpdoctor-trial-x"
    apart.mkdir()
    told = copy_folder(here, apart / "copy", apart)
    assert told == "The copy of the working directory lacks 1 recorded run and 1 pipe, socket or device." or (
        told == "The copy of the working directory lacks 1 pipe, socket or device and 1 recorded run."
    )
    copy = apart / "copy"
    assert sorted(path.name for path in copy.iterdir()) == ["data", "ddpdoctor-runs", "gone", "train.py"]
    assert list((copy / "ddpdoctor-runs").iterdir()) == []
    assert (copy / "train.py").read_bytes() == b"12"


def test_a_whole_copy_says_nothing(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_text("x")
    assert copy_folder(tmp_path / "here", tmp_path / "copy", tmp_path / "copy") == ""


def test_links_lead_into_the_copy_or_where_they_led_which_is_told(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "logs").mkdir(parents=True)
    elsewhere.mkdir()
    (here / "last").symlink_to(here / "logs")
    (here / "results").symlink_to("../elsewhere")
    (here / "logs" / "up").symlink_to("..")
    (here / "python").symlink_to(shutil.which("sh"))
    copy = tmp_path / "deeper" / "copy"
    copy.parent.mkdir()
    told = copy_folder(here, copy, copy.parent)
    assert told == "1 link leads out of the copy: what the job writes there is not in a copy."
    (copy / "last" / "a").write_text("x")
    assert (copy / "logs" / "a").exists()
    assert (copy / "results").resolve() == elsewhere
    assert (copy / "logs" / "up").resolve() == copy
    assert list((here / "logs").iterdir()) == [here / "logs" / "up"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_left_out(tmp_path):
    here = tmp_path / "here"
    (here / "closed").mkdir(parents=True)
    (here / "closed").chmod(0)
    (here / "secret").write_text("x")
    (here / "secret").chmod(0)
    assert "2 entries that may not be read" in copy_folder(here, tmp_path / "copy", tmp_path)


def test_storage_that_takes_no_more_is_one_error(tmp_path, monkeypatch):
    def full(file: str, to: str) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_text("x")
    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left on device"):
        copy_folder(tmp_path / "here", tmp_path / "copy", tmp_path)


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"MOST_BYTES": 100}, "more than 0.0 GB"), ({"MOST_FILES": 2}, "more than 2 files")],
)
def test_a_working_directory_that_is_too_large_is_not_copied(tmp_path, monkeypatch, limits, says):
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    for number in range(3):
        (here / "data" / f"{number}.bin").write_bytes(b"x" * 40)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "large.bin").write_bytes(b"x" * 4000)
    (here / "linked").symlink_to(tmp_path / "set")
    for name, value in limits.items():
        monkeypatch.setattr(copies, name, value)
    with pytest.raises(OSError, match=f"holds {says}, which is too much"):
        copy_folder(here, tmp_path / "copy", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    (here / "data" / "2.bin").unlink()
    copy_folder(here, tmp_path / "copy", tmp_path / "copy")


def test_what_is_not_copied_does_not_count(tmp_path, monkeypatch):
    here = tmp_path / "here"
    run, apart = here / "runs" / "one", here / "ddpdoctor-trial-x"
    for folder in (run, apart):
        folder.mkdir(parents=True)
        (folder / "large").write_bytes(b"x" * 4000)
    (run / "manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    monkeypatch.setattr(copies, "MOST_BYTES", 100)
    copy_folder(here, apart / "copy", apart)
    assert not (apart / "copy" / "runs" / "one").exists()
