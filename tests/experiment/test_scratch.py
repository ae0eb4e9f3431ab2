"""Folders of trials, and those that a killed process left."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddpdoctor.experiment import scratch
from ddpdoctor.experiment.scratch import scratch_folder

USES_ONE = """
from ddpdoctor.experiment.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "copy").mkdir()
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_left_alone_until_its_process_has_gone(place):
    with subprocess.Popen(
        [sys.executable, "-c", USES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        folder = Path(other.stdout.readline().strip())
        assert folder.parent == place
        with scratch_folder():
            assert (folder / "copy").is_dir()
        other.send_signal(signal.SIGKILL)
    with scratch_folder() as own:
        assert list(place.iterdir()) == [own]
    assert list(place.iterdir()) == []


def test_what_is_no_folder_of_a_trial_stays(place):
    kept = [place / "ddpdoctor-trial-file", place / "ddpdoctor-trial-folder", place / "ddpdoctor-trial-link"]
    kept[0].write_text("x")
    kept[1].mkdir()
    kept[2].symlink_to(kept[1])
    with scratch_folder():
        pass
    assert sorted(place.iterdir()) == kept


@pytest.mark.parametrize("content", [None, "", "my own lock", "link"])
def test_a_folder_without_our_lock_stays_whatever_its_name(place, content):
    folder = place / "ddpdoctor-trial-abcd1234"
    folder.mkdir(mode=0o700)
    (folder / "results").write_text("mine")
    if content == "link":
        (place / "lock").write_bytes(scratch._MARK)
        (folder / "lock").symlink_to(place / "lock")
    elif content is not None:
        (folder / "lock").write_text(content)
    named = place / "ddpdoctor-trial-of-mine"
    named.mkdir(mode=0o700)
    (named / "lock").write_bytes(scratch._MARK)
    with scratch_folder():
        pass
    assert (folder / "results").read_text() == "mine" and named.is_dir()
