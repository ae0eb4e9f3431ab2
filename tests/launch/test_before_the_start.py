"""Whatever fails of ours before the job starts, the job runs, with its own exit code."""

from __future__ import annotations

import pytest

from ddpdoctor.launch import session
from ddpdoctor.launch.options import RunOptions

STAGES = [
    "job_identity",
    "new_manifest",
    "open_run",
    "make_spool_root",
    "run_with_timeout",
    "HelperProcess",
    "job_environment",
]
ERRORS = [OSError(24, "Too many open files"), RuntimeError("a fault of ours")]


@pytest.mark.parametrize("error", ERRORS, ids=["OSError", "RuntimeError"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_costs_the_recording_only(tmp_path, monkeypatch, stage, error) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    ran: list[tuple[str, ...]] = []
    said: list[str] = []
    monkeypatch.setattr(session, stage, fail)
    monkeypatch.setattr(session, "_run_unrecorded", lambda command, *_: ran.append(tuple(command)))
    session.run_job(["job"], RunOptions(out=tmp_path / "run"), {}, warn=said.append)
    assert ran == [("job",)] and len(said) == 1 and "nothing is recorded" in said[0]
    assert not (tmp_path / "run" / "manifest.json").exists()
