"""Closed streams, streams with a limited encoding, and unreadable inputs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.cli.main import EXIT_UNUSABLE
from ddpdoctor.report.read import holds_diagnosis

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "fixtures" / "slow-data-one-rank"


def shell(line, cwd, **environment):
    """Exit code, stdout and stderr of a shell's ``line``, in which ``$D`` is the command."""
    done = subprocess.run(
        ["/bin/bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "D": f"{sys.executable} -m ddpdoctor", **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_job_without_standard_output_ends_with_its_own_code(tmp_path, closed):
    code, _, err = shell(f"$D run --out r -- sh -c 'exit 3' {closed}", tmp_path)
    assert code == 3 and "Traceback" not in err


def test_closed_streams_stay_closed_for_the_job(tmp_path):
    code, _, _ = shell("$D run --out r -- sh -c 'test ! -e /proc/self/fd/1 && exit 7' >&-", tmp_path)
    assert code == 7


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_analyze_without_standard_output(tmp_path, closed):
    code, _, err = shell(f"$D analyze {RUN} --fail-on critical --json d.json {closed}", tmp_path)
    assert (code, err) == (1, "") and (tmp_path / "d.json").stat().st_size > 1000


def test_characters_that_the_terminal_lacks_are_replaced(tmp_path):
    code, out, err = shell(f"$D analyze {RUN} -v", tmp_path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "") and "?" in out
    assert shell("$D rules list", tmp_path, PYTHONIOENCODING="latin-1")[0] == 0


@pytest.mark.skipif(
    os.getuid() == 0 and not shutil.which("setpriv"),
    reason="root may read everything, and cannot give that up here",
)
def test_an_unreadable_trace_is_one_sentence(tmp_path):
    file = tmp_path / "rank0.json.gz"
    shutil.copy(RUN / "ranks/00000/trace.json.gz", file)
    file.chmod(0)
    as_anybody = "setpriv --bounding-set=-dac_override,-dac_read_search" if os.getuid() == 0 else ""
    code, _, err = shell(f"{as_anybody} $D analyze rank0.json.gz", tmp_path)
    assert code == EXIT_UNUSABLE and err == "ddpdoctor: rank0.json.gz cannot be opened: permission denied.\n"


def test_an_unreadable_file_has_no_diagnosis(tmp_path, monkeypatch):
    file = tmp_path / "rank0.json.gz"
    file.write_text("{}")

    def refuse(*arguments, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert not holds_diagnosis(file)
