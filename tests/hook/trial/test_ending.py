"""What a trial removes at its end."""

from __future__ import annotations

import subprocess

import pytest

from tests.ranks import forked

ENDS = """
import multiprocessing.process, multiprocessing.util, os, sys
from ddpdoctor.hook.trial import ending
if len(sys.argv) > 1:
    multiprocessing.process.current_process()._config["tempdir"] = sys.argv[1]
ending.share_temporary_folder()
print(multiprocessing.util.get_temp_dir(), flush=True)
ending._end_children()
os._exit(0)
"""


@pytest.mark.parametrize("chosen", [True, False])
def test_the_folder_of_multiprocessing_goes_unless_the_job_chose_it(tmp_path, monkeypatch, chosen):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "ends.py").write_text(ENDS)
    (own / "checkpoint.pt").write_text("mine")
    done = subprocess.run(
        forked(tmp_path / "ends.py", *([str(own)] if chosen else []), ranks=0),
        capture_output=True,
        text=True,
        check=True,
    )
    used = done.stdout.strip()
    assert (used == str(own)) == chosen
    assert (own / "checkpoint.pt").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ends.py", "own"]
