"""An error in any function of the hook, and the job goes on."""

from __future__ import annotations

import re
import sys

import pytest

from .recording import JOBS, HookOptions, forked, plain_environment, run_recorded


@pytest.mark.alone  # it takes minutes, and has a limit of nine
def test_no_error_of_ours_reaches_the_job(tmp_path) -> None:
    command = [sys.executable, str(JOBS / "planted_errors.py")]
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(2, 4)), timeout_s=540)
    assert recorded.process.returncode == 0, recorded.process.stderr
    found = re.fullmatch(r"tried (\d+)\n", recorded.process.stdout)
    assert found is not None, recorded.process.stdout
    assert int(found.group(1)) > 150
    lines = recorded.process.stderr.splitlines()
    assert [
        line
        for line in lines
        if not re.match(r"ddpdoctor: .* \(RuntimeError: planted\); the job goes on\.", line)
    ] == []


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "function",
    [
        *(
            pytest.param(f"finder.{name}", marks=pytest.mark.extended)
            for name in ("_watched_spec", "after_import")
        ),
        *(
            "install.install",
            "patching.around",
            "patching._skip",
            "patching.cell_of",
            "patching._code_hidden_from_warnings",
        ),
        *("guard.part", "patches.optimizers.install", "lifetime.watch_process"),
    ],
)
def test_nor_does_one_while_torch_is_patched(tmp_path, function: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    module, _, name = function.rpartition(".")
    (own / "sitecustomize.py").write_text(
        "import importlib\n"
        f"module = importlib.import_module('_ddpdoctor.hook.{module}')\n"
        "def planted(*args, **kwargs):\n    raise RuntimeError('planted')\n"
        f"module.{name} = planted\n"
    )
    base = plain_environment(PYTHONPATH=str(own))
    # The finder waits for an import of torch, which a forked process has made already.
    command = (
        [sys.executable, str(JOBS / "single.py")] if module == "finder" else forked("single.py", ranks=0)
    )
    recorded = run_recorded(tmp_path, command, base=base)
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.process.stdout == "single done\n"
    assert recorded.process.stderr.count("\n") <= 1


@pytest.mark.torchrun
def test_nor_does_one_at_the_end_of_a_brief_step(tmp_path) -> None:
    """What torch calls there catches its own errors."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "from _ddpdoctor.hook.recording import recorder\n"
        "def planted(*args, **kwargs):\n    raise RuntimeError('planted')\n"
        "recorder.Recorder.end_brief_step = planted\n"
    )
    base = plain_environment(PYTHONPATH=str(own))
    command = forked("plain_ddp.py", "--steps", "400", "--exit-hard", ranks=1)
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=None), base)
    assert (recorded.process.returncode, recorded.process.stdout) == (0, "done 400\n"), (
        recorded.process.stderr
    )
    assert [error for error in recorded.info(0)["hook"]["errors"] if "planted" in error]
