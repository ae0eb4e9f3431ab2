"""What is written down of calls while they run: numbers by process group, and when the same was called before."""

from __future__ import annotations

import _thread
import errno
import json
import os
import signal
import threading
from collections.abc import Iterator
from importlib import import_module
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.hook.recording import Backward, active, backwards
from ddpdoctor.hook.recording.crash_records import Calls
from ddpdoctor.rundir.calls_page import CALL_SLOTS, DDP_SLOTS, lines_of_calls

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
        backward=Backward(recorder),  # type: ignore[arg-type]
        models=SimpleNamespace(first_reducing=lambda: seen, open=[]),
        devices=None,
        thread_is_known=True,
    )
    monkeypatch.setattr(active, "session", session)
    monkeypatch.setattr(backwards, "full", False)
    monkeypatch.setattr(backwards, "usual", None)
    yield session
    backward._PART.off, backward._PART.errors = False, 0


def test_what_is_noted_of_a_brief_backward_is_what_begin_notes(brief) -> None:
    """The wrapper of backwards has a copy of ``begin``."""
    noted = []
    for is_brief in (True, False):
        memory = Memory()
        brief.recorder.calls = calls = Calls(memory)  # type: ignore[arg-type]
        backwards.usual = None
        rows: list[list[dict[str, Any]]] = []
        reduce = backward._fast_wrapper(lambda rows=rows, memory=memory: rows.append(memory.rows()))
        for step in range(2 * DDP_SLOTS):
            if step % 3 == 1:  # DDP's other calls share the slots, and calls from Python share the numbers
                calls.end(calls.begin(calls.recurring('"k":"bcast","pg":"0"', "0"), step, by_ddp=True))
            if step % 4 == 2:
                calls.end(calls.begin(calls.recurring(SUM, "0"), step))
            brief.recorder.step = step
            if not is_brief:
                backwards.usual = None
            reduce()
            rows.append(memory.rows())
        assert (backwards.usual is not None) and len(rows) == 4 * DDP_SLOTS
        noted.append(rows)
    assert noted[0] == noted[1]
    last = noted[0][-2][-1]
    assert (last["open"], last["step"], noted[0][-1][-1]["open"]) == (1, 2 * DDP_SLOTS - 1, 0)


@pytest.mark.parametrize("memory", [Memory, NoMemory])
def test_a_backward_is_over_and_counted_once_also_without_memory_for_its_call(brief, memory) -> None:
    brief.recorder.calls = calls = Calls(memory())
    reduce = backward._fast_wrapper(lambda: None)
    for _ in range(4):
        reduce()
    assert brief.backward.depth == 0
    assert calls.recurring('"k":"bwd","pg":"0","at":0', "0").turns == [4]


class Struck:
    """A model that the job's signal handler interrupts when it is asked whether it reduces."""

    @property
    def require_backward_grad_sync(self) -> bool:
        os.kill(os.getpid(), signal.SIGUSR1)
        return True


def test_what_a_handler_raises_in_a_brief_backward_is_the_jobs(brief) -> None:
    """ValueError is also what Python raises for a frame that does not exist."""

    def handler(*_: object) -> None:
        raise ValueError("the job's")

    def reduce_thrice(count: int) -> None:
        for number in range(3):
            if number == count:
                brief.backward.model = Struck
            reduce()

    reduce, model = backward._fast_wrapper(lambda: None), brief.models.first_reducing().ref
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(ValueError, match="the job's"):
            reduce_thrice(2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    brief.backward.model = model
    reduce_thrice(3)
    assert brief.backward.depth == backward._PART.errors == 0


def test_a_brief_backward_is_noted_only_on_its_thread_from_its_line_and_while_the_recording_lasts(
    brief,
) -> None:
    calls = brief.recorder.calls
    reduce = backward._fast_wrapper(lambda: None)

    def reduce_here() -> None:
        reduce()

    for _ in range(3):
        reduce_here()
    count = calls.recurring('"k":"bwd","pg":"0","at":0', "0").turns
    assert count == [3] and backwards.usual is brief.backward
    other = threading.Thread(target=reduce_here)
    other.start()
    other.join()
    assert count == [3], "another thread's backward is not recorded"
    active.stop()
    reduce_here()
    assert count == [3] and backwards.usual is None


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
