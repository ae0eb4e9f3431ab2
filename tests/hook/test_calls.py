"""What is written down of calls while they run: numbers by process group, and when the same was called before."""

from __future__ import annotations

import _thread
import errno
import json
import os
import threading
from collections.abc import Iterator
from importlib import import_module
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.hook.recording import active, backwards
from ddpdoctor.hook.recording.crash_records import Calls
from ddpdoctor.rundir import CALL_SLOTS, DDP_SLOTS, lines_of_calls

backward = import_module("ddpdoctor.hook.patches.backward")  # as the hook itself loads it
SUM, GRADIENTS = '"k":"coll","op":"all_reduce","pg":"0"', '"k":"bwd","pg":"0"'


class Memory:
    """What a spool gives to write in."""

    def shared(self, name: str, size: int) -> memoryview:
        self.memory = bytearray(size)
        return memoryview(self.memory).cast("q")

    def rows(self) -> list[dict[str, Any]]:
        lines = lines_of_calls(bytes(self.memory)).splitlines()
        return sorted(map(json.loads, lines), key=lambda row: row["call"])


def test_calls_of_a_group_are_numbered_whoever_issues_them() -> None:
    memory = Memory()
    calls = Calls(memory)  # type: ignore[arg-type]
    calls.end(calls.begin(calls.recurring(GRADIENTS, "0"), 0, by_ddp=True))
    calls.end(calls.begin(calls.recurring(SUM, "0"), 0))
    calls.begin(calls.recurring('"k":"coll","op":"isend","pg":"0"', None), 0)
    calls.end(calls.begin(calls.recurring(SUM.replace('"0"', '"1"'), "1"), 1))
    calls.begin(calls.recurring(SUM, "0"), 1)
    rows = memory.rows()
    assert [row.get("n") for row in rows] == [1, 2, None, 1, 3]
    assert [row["open"] for row in rows] == [0, 0, 1, 0, 1]
    assert [(row.get("p"), row.get("pp")) for row in rows][-1] == (2, 0)


def test_what_ddp_issues_in_every_step_pushes_out_no_call_from_python() -> None:
    memory = Memory()
    calls = Calls(memory)  # type: ignore[arg-type]
    calls.end(calls.begin(calls.recurring(SUM, "0"), 0))
    for step in range(3 * DDP_SLOTS + CALL_SLOTS):
        calls.end(calls.begin(calls.recurring(GRADIENTS, "0"), step, by_ddp=True))
    rows = memory.rows()
    assert (len(rows), rows[0]["k"]) == (1 + DDP_SLOTS, "coll")
    last = rows[-1]["n"]
    assert (rows[-1]["p"], rows[-1]["pp"]) == (last - 1, last - 2)


class NoMemory:
    """A full ``/dev/shm``."""

    def shared(self, name: str, size: int) -> memoryview:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def brief(monkeypatch) -> Iterator[SimpleNamespace]:
    """A recording whose steps are brief, of a model of the process group "0"."""
    model = SimpleNamespace(require_backward_grad_sync=True)
    seen = SimpleNamespace(group="0", ref=lambda: model)
    recorder = SimpleNamespace(
        thread=get_ident(),
        step=1,
        calls=Calls(Memory()),  # type: ignore[arg-type]
        lines=SimpleNamespace(caller=lambda: ',"at":0'),
        flush_definitions=lambda: None,
    )
    session = SimpleNamespace(
        recorder=recorder,
        backward=SimpleNamespace(depth=0, steps_optimizer=False, last=None, lines={}),
        models=SimpleNamespace(first_reducing=lambda: seen, open=[]),
        devices=None,
        thread_is_known=True,
    )
    monkeypatch.setattr(active, "session", session)
    monkeypatch.setattr(backwards, "full", False)
    yield session
    backward._PART.off, backward._PART.errors = False, 0


@pytest.mark.parametrize("memory", [Memory, NoMemory])
def test_a_backward_is_over_and_counted_once_also_without_memory_for_its_call(brief, memory) -> None:
    brief.recorder.calls = calls = Calls(memory())
    reduce = backward._fast_wrapper(lambda: None)
    for _ in range(4):
        reduce()
    assert brief.backward.depth == 0
    assert calls.recurring('"k":"bwd","pg":"0","at":0', "0").turns == [4]


_OUTERMOST = """
def method():
    reduce()

recorder.thread = get_ident()
for _ in range(4):
    method()
    reduce()
done.set()
"""


def test_a_backward_may_be_called_as_a_function_in_the_outermost_frame(brief, monkeypatch) -> None:
    """There is no frame above, as there is above ``Tensor.backward``."""
    reduce, done = backward._fast_wrapper(lambda: None), threading.Event()
    program = compile(_OUTERMOST, "train.py", "exec")
    monkeypatch.setattr(
        backward, "_TENSOR_BACKWARD", next(each for each in program.co_consts if hasattr(each, "co_code"))
    )
    names = {"reduce": reduce, "recorder": brief.recorder, "done": done, "get_ident": get_ident}
    # A thread of ``threading`` has frames of its own above.
    _thread.start_new_thread(exec, (program, names))
    assert done.wait(10) and backward._PART.errors == 0
