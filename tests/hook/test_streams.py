"""The job's own errors and warnings read as they do without us: same lines, no frame of ours between them."""

from __future__ import annotations

import re
import sys

import pytest

from .recording import HookOptions, forked, one_rank, plain_environment, run_plain, run_recorded

WAITS_FOR_STORAGE = re.compile(r"^ddpdoctor: .* did not accept in time what rank 0 recorded last; .*\n", re.M)
"""The one thing that we say at a job's end: its storage was busy with something else."""


def comparable(stderr: str) -> str:
    """Without addresses and process ids, which differ from run to run."""
    return re.sub(r"0x[0-9a-f]+|\[[WE]\d+ [\d:.]+|\(pid \d+\)|worker process \d+", "#", stderr)


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="a bare raise keeps the wrapper's line before Python 3.11"
)
def test_errors_and_warnings_are_the_jobs_own(tmp_path) -> None:
    command = forked("errors_and_warnings.py", ranks=0)
    plain = run_plain(tmp_path, command)
    recorded = run_recorded(tmp_path, command)
    assert plain.returncode == recorded.process.returncode == 1
    ours = WAITS_FOR_STORAGE.sub("", recorded.process.stderr)
    assert comparable(ours) == comparable(plain.stderr)
    assert plain.stderr.count("Traceback") >= 10 and "errors_and_warnings.py" in plain.stderr
    assert "UserWarning" in plain.stderr and len(recorded.steps(0)) == 3


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="a bare raise keeps the wrapper's line before Python 3.11"
)
@pytest.mark.parametrize("content", ["raise ImportError('libc10.so is missing')", "__version__ = '9.9'"])
def test_a_torch_that_is_broken_or_strange(tmp_path, content: str) -> None:
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text(content + "\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'path')!r}); import torch; print(torch.__version__)"
    )
    plain = run_plain(tmp_path, [sys.executable, "-c", code])
    recorded = run_recorded(tmp_path, [sys.executable, "-c", code])
    assert (recorded.process.returncode, recorded.process.stdout) == (plain.returncode, plain.stdout)
    ours = recorded.process.stderr.replace(plain.stderr, "")
    assert ours == "" if plain.returncode else ours.count("\n") == 1


@pytest.mark.extended
def test_warnings_as_errors_are_none_of_ours(tmp_path) -> None:
    base = plain_environment(
        PYTHONWARNINGS="error::DeprecationWarning,error::FutureWarning,error::UserWarning"
    )
    command = [*one_rank("plain_ddp.py", "--steps", "8", "--exit-hard")]
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(4, 6)), base)
    assert (recorded.process.returncode, recorded.process.stdout) == (0, "done 8\n"), recorded.process.stderr
    assert recorded.info(0)["hook"]["errors"] == [] and recorded.info(0)["window"]["state"] == "saved"
