"""What an error or another thread that comes in between leaves: nothing half done."""

from __future__ import annotations

from importlib import import_module
from threading import RLock, get_ident
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.recording import Recorder
from ddpdoctor.rundir.stepevents import EventKind


def test_a_line_that_another_thread_adds_while_others_are_written_is_written_with_the_next() -> None:
    written: list[bytes] = []

    def write(stream: str, data: bytes) -> bool:
        if not written:
            recorder.pending.append("meanwhile\n")
        written.append(data)
        return True

    recorder = SimpleNamespace(
        pending=["first\n"],
        spool=SimpleNamespace(write=write),
        write_brief_steps=lambda: None,
        _writing=RLock(),
    )
    Recorder.write_now(recorder, "second\n")
    Recorder.write_now(recorder, "third\n")
    assert written == [b"first\nsecond\n", b"meanwhile\nthird\n"] and recorder.pending == []


def test_an_error_before_a_checkpoint_hides_none_of_those_after_it(monkeypatch) -> None:
    """A signal handler of the job's may raise in the midst of our code."""
    events: list[str] = []
    checkpoints = import_module("ddpdoctor.hook.patches.others")  # as the hook itself loads it

    def struck(through: bool) -> str:
        raise KeyboardInterrupt

    recorder = SimpleNamespace(
        lines=SimpleNamespace(caller=struck),
        add=lambda start, length, fields: events.append(fields),
        note_saved=lambda: None,
        thread=get_ident(),
    )
    monkeypatch.setattr(checkpoints, "active", SimpleNamespace(recorder=recorder))
    before, after = checkpoints.checkpoint_event(EventKind.SAVE)
    with pytest.raises(KeyboardInterrupt):
        before((), {})
    recorder.lines.caller = lambda through: ""
    after(before((), {}), None)
    assert len(events) == 1
