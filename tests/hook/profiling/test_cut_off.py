"""A window that is cut off says by what."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.profiling import torch_profiler, window
from ddpdoctor.rundir import Mark


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


@pytest.mark.parametrize("backends", [["nccl"], ["nccl", "cpu:gloo,cuda:nccl"]])
def test_on_a_device_the_profiler_is_closed_once_the_windows_work_is_done(
    opened, monkeypatch, backends
) -> None:
    """Kernels go on being recorded until then. Where Gloo may still write, the window stays open for as long as on CPUs."""
    made, state = opened
    closed = []
    monkeypatch.setattr(window, "end_collection", lambda: None)
    monkeypatch.setattr(window, "close_profiler", closed.append)
    groups = {"process_groups": [{"backend": each} for each in backends]}
    monkeypatch.setattr(torch_profiler, "process_groups", lambda: groups)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    session, made._ended, made._stop, made._activities = made._session, 0, 15, {"CPU", "CUDA"}
    passed = [14]
    session.devices = SimpleNamespace(behind=lambda step: passed[-1] < step)
    for step in (15, 16, 17):
        made.at_step(step)
        assert not closed
    assert session.recorder.marks == [Mark.SAVING, Mark.SAVING]
    passed.append(15)
    made.at_step(18)
    assert bool(closed) == (backends == ["nccl"])
    if not closed:
        made._ended -= 2 * torch_profiler.SETTLE_NS
        made.at_step(19)
    assert len(closed) == 1 and state["steps"] == [10, 15]
