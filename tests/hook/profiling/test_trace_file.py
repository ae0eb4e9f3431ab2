"""A trace that is still being written when the job ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from ddpdoctor.hook import guard
from ddpdoctor.hook.profiling import trace_file


@pytest.mark.parametrize("left", [False, True])
def test_what_fails_once_nobody_waits_any_more_is_not_told(monkeypatch, capsys, left):
    go_on, told = threading.Event(), []

    def save(job):
        go_on.wait(10)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(trace_file.TraceJob, "_save_trace", save)
    monkeypatch.setattr(trace_file, "_header", lambda session: {})
    monkeypatch.setattr(guard, "errors", [])
    session = SimpleNamespace(document={"ended_ns": None}, rank=0)
    job = trace_file.TraceJob(session, None, 0, lambda *words: told.append(words), 0, number=1)
    job.start()
    if left:
        job.finish_until(time.monotonic())
        session.document["ended_ns"] = 1
        go_on.set()
    else:
        go_on.set()
        job.finish_until(time.monotonic() + 10)
    job._thread.join(10)
    assert bool(told) is not left
    assert ("could not be saved" in capsys.readouterr().err) is not left
