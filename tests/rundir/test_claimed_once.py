"""A rank's folder in the run directory is made once, however often the copy of its records fails."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from ddpdoctor.rundir import STEPS_FILE, owned
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.launch.launched import make_run


def test_a_copy_that_fails_again_and_again_leaves_no_folders(tmp_path, monkeypatch) -> None:
    """As in a container whose /dev/shm is full: there is no room to note which folder is the rank's."""
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    spool = Spool(root, 0, str(run))
    try:
        spool.write(STEPS_FILE, b'{"schema":"ddpdoctor.steps/2"}\n')

        def full(name: str, within: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as memory:
            memory.setattr(owned, "replace_file", full)
            for _ in range(3):
                with pytest.raises(OSError, match="No space left"):
                    drain(spool.directory)
        assert list((run / "ranks").iterdir()) == []
        drain(spool.directory)
        assert [folder.name for folder in (run / "ranks").iterdir()] == ["00000"]
        assert (run / "ranks" / "00000" / STEPS_FILE).stat().st_size > 0
    finally:
        spool.close()
        shutil.rmtree(root)
