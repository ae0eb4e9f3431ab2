"""The content of the cache is trusted, so the cache is used only if no other user can write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ddpdoctor.cachefolder import cache_folder, is_private, keep_newest, make_private, open_private


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder("traces")


def another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process appear to run as another user."""
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)


def test_the_folder_is_created_with_private_permissions(folder):
    assert not is_private(folder) and make_private(folder) and is_private(folder)
    assert {stat.S_IMODE(place.stat().st_mode) for place in (folder, folder.parent)} == {0o700}


@pytest.mark.parametrize("which", ["folder", "around"])
def test_a_folder_writable_by_others_is_not_used(folder, which):
    make_private(folder)
    (folder if which == "folder" else folder.parent).chmod(0o770)
    assert not is_private(folder) and not make_private(folder)


@pytest.mark.parametrize("which", ["folder", "around"])
def test_a_link_is_not_used(folder, tmp_path, which):
    make_private(folder)
    place = folder if which == "folder" else folder.parent
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    assert not is_private(folder) and not make_private(folder)


def test_a_folder_of_another_user_is_not_used_and_not_created(folder, monkeypatch):
    """Root in a user's home folder neither reads that user's cache nor creates one that the user cannot write to."""
    folder.parent.parent.mkdir()
    make_private(folder)
    if os.geteuid() == 0:  # folders of root may be used by all
        os.chown(folder.parent.parent, 4711, -1)
        os.chown(folder.parent, 4711, -1)
    else:
        another_user(monkeypatch)
    assert not is_private(folder) and not make_private(folder)
    folder.rmdir()
    folder.parent.rmdir()
    assert not make_private(folder) and not folder.parent.exists()


def test_only_private_entries_that_are_not_links_are_opened(folder, tmp_path, monkeypatch):
    make_private(folder)
    entry = folder / "entry"
    entry.write_bytes(b"kept")
    entry.chmod(0o600)
    with open_private(entry) as stream:
        assert stream.read() == b"kept"
    (folder / "link").symlink_to(entry)
    os.mkfifo(folder / "fifo")
    for other in ("link", "fifo", "none"):
        with pytest.raises(OSError):
            open_private(folder / other)
    entry.chmod(0o666)
    with pytest.raises(OSError, match="another user"):
        open_private(entry)
    entry.chmod(0o600)
    another_user(monkeypatch)
    with pytest.raises(OSError, match="another user"):
        open_private(entry)


def test_only_entries_are_removed(folder):
    make_private(folder)
    own = [folder / name for name in ("notes.txt", "a.cached", "b.msgpack", f"{'0' * 40}.txt")]
    for file in own:
        file.write_text("mine")
    inside = folder / f"{'1' * 40}.cached"
    inside.mkdir()
    entries = [
        folder / f"{number:040x}{suffix}" for number in range(2, 6) for suffix in (".cached", ".msgpack")
    ]
    left = folder / ".ddpdoctor-0123456789abcdef.new"
    for file in (*entries, left):
        file.write_bytes(b"x" * 100)
    keep_newest(folder, ".cached", max_bytes=0)
    keep_newest(folder, ".msgpack", max_files=0)
    assert sorted(folder.iterdir()) == sorted([*own, inside])
