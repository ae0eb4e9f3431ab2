"""A window that is cut off says by what."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.profiling import window


@pytest.fixture
def opened(monkeypatch):
    """A window whose collection has ended, and its part of rank.json."""
    monkeypatch.setattr(window, "windows", [])
    monkeypatch.setenv("DDPDOCTOR_PROFILE_STEPS", "10:15")
    recorder = SimpleNamespace(always_full=True, marks=[], step=74)
    session = SimpleNamespace(document={}, recorder=recorder)
    made = window.Window(session, SimpleNamespace(document_changed=threading.Event()))
    made._open, made._opener, made._ended = True, threading.get_ident(), 1
    made._state.update(state="open", steps=[10, 15])
    return made, session.document["window"]


def test_an_interrupt_while_the_profiler_is_closed(opened, monkeypatch) -> None:
    """Ctrl-C comes back from torch with the profiler closed, and its result gone."""

    def interrupted(opener):
        raise KeyboardInterrupt

    made, state = opened
    monkeypatch.setattr(window, "close_profiler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made._close()
    monkeypatch.setattr(window, "close_profiler", lambda opener: None)
    made.finish(time.monotonic())
    assert state["state"] == "failed" and state["steps"] == [10, 15]
    assert state["why"] == "the job was interrupted, as by Ctrl-C, while the profiler was being closed"


def test_a_profiler_that_was_closed_by_somebody_else(opened, monkeypatch) -> None:
    made, state = opened
    monkeypatch.setattr(window, "close_profiler", lambda opener: None)
    made._close()
    assert state["why"] == "the profiler was taken over, or closed, by something else"
