"""Steps of which only the times are kept: whatever interrupts the recorder, none is lost or written twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.hook.job import CodeKinds
from ddpdoctor.hook.recording import Recorder, Writer, active, starts
from ddpdoctor.rundir import STEPS_FILE, file_identity, liveness
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.heartbeat import HEARTBEAT_FILE
from ddpdoctor.rundir.layout import opened_spool
from ddpdoctor.rundir.liveness import State
from ddpdoctor.rundir.segments import Segment
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.launch.launched import make_run

module = import_module(Recorder.__module__)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """Of rank 0 of the run ``tmp_path / "run"``, 16 steps before its next step in full."""
    run = str(make_run(tmp_path / "run"))
    found = Recorder(Spool(make_spool_root(run), 0, run), CodeKinds())
    found._full_block, found.brief_until, found.thinning.every = False, 64, 64
    active.record(full=False)
    yield found
    active.stop()
    found.close()
    shutil.rmtree(make_spool_root(run))


def end(recorder: Recorder) -> None:
    """End a step as the hooks do, 1 ms after the one before."""
    at = recorder.start_perf_ns + 1_000_000
    if active.full or not recorder.end_brief_step(at):
        recorder.end_step(recorder.cut(at))


def logged(recorder: Recorder) -> list[tuple[int, int, int]]:
    """Number, start and end of each step of the log, all of which must have their place in it."""
    recorder.write_now("")
    rows = [
        json.loads(line)
        for line in Path(drain(recorder.spool.directory), STEPS_FILE).read_text().splitlines()
    ]
    steps = [(row["step"], *row["t"]) for row in rows if "t" in row]
    assert [number for number, _, _ in steps] == list(range(len(steps)))
    return steps


class StruckError(TimeoutError):
    """As handlers of SIGALRM raise."""


FILES = {
    sys.modules[each.__module__].__file__ for each in (Recorder, Spool, Segment, opened_spool, file_identity)
}


def interrupted(call: int, handler: Callable[[], None], run: Callable[[], None]) -> bool:
    """Run ``run`` with the handler at its ``call``-th call, where Python runs signal handlers; whether it has so many. What the handler
    raises must come back."""
    seen = [0]

    def strike(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in FILES:
            seen[0] += 1
            if seen[0] == call:
                sys.setprofile(None)
                handler()

    sys.setprofile(strike)
    try:
        run()
        assert handler is not raises or seen[0] < call
    except StruckError:
        pass
    finally:
        sys.setprofile(None)
    return seen[0] >= call


def raises(*_: object) -> None:
    raise StruckError


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """``raises`` is a handler of the job's."""
    before = signal.signal(signal.SIGUSR1, raises)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("segment", ["room", "full"])
@pytest.mark.parametrize("what", ["raises", "steps"])
def test_a_handler_at_any_call_of_a_steps_end_makes_no_step_twice(
    recorder: Recorder, what: str, segment: str, full: bool
) -> None:
    handler = raises if what == "raises" else lambda: [end(recorder) for _ in range(3)] and None
    for call in range(1, 200):
        for _ in range(6 + call % 4):
            end(recorder)
        recorder.marks.append("mark")
        if segment == "full" and recorder.spool._streams:
            recorder.spool._streams[STEPS_FILE].size = 0
            drain(
                recorder.spool.directory
            )  # the calls of a new segment's making include one for each earlier segment
        recorder._full_block = full
        active.record(full=full)
        if not interrupted(
            call,
            handler,
            lambda: recorder.end_step(recorder.cut(recorder.start_perf_ns + 1_000_000)),
        ):
            break
    else:
        pytest.fail("a step's end makes hundreds of calls")
    assert call > 5
    steps = logged(recorder)
    assert len(steps) == recorder.step
    assert all(0 < last - first < 10_000_000 for _, first, last in steps)
    assert all(after[1] - before[1] > 900_000 for before, after in pairwise(steps))


@pytest.mark.parametrize("what", ["raises", "steps"])
def test_a_handler_at_any_call_of_other_writes_makes_no_step_twice(recorder: Recorder, what: str) -> None:
    handler = raises if what == "raises" else lambda: [end(recorder) for _ in range(3)] and None
    for write in (recorder.write_brief_steps, lambda: recorder.write_now("{}\n")):
        for call in range(1, 100):
            for _ in range(6 + call % 4):
                end(recorder)
            if not interrupted(call, handler, write):
                break
    assert len(logged(recorder)) == recorder.step


@pytest.mark.parametrize("set_ns", [-3_600_000_000_000, 3_600_000_000_000, -20_000])
def test_no_step_has_its_start_and_its_end_by_two_clocks(
    recorder: Recorder, monkeypatch, set_ns: int
) -> None:
    """The host's clock is set while steps wait in the page."""
    real = module.time_ns
    for number in range(96):
        if number % 20 == 9:
            monkeypatch.setattr(module, "time_ns", lambda offset=number * set_ns: real() + offset)
        end(recorder)
        if number == 50:
            recorder.switch_to_this_thread()
    recorder.write_brief_steps()
    assert {last - first for _, first, last in logged(recorder)} == {1_000_000}


def test_a_thread_without_a_cpu_between_two_clocks_moves_no_step(recorder: Recorder, monkeypatch) -> None:
    real, lag_ns = module.time_ns, [0]
    monkeypatch.setattr(module, "time_ns", lambda: real() - lag_ns.pop() if len(lag_ns) > 1 else real())
    for number in range(40):
        recorder.brief_until = 0
        if number == 15:
            lag_ns.append(12_000_000)
        end(recorder)
    steps = logged(recorder)
    assert all(abs(after[1] - before[2]) < 1_000_000 for before, after in pairwise(steps))


def test_steps_are_in_the_log_soon_also_without_a_status_thread(recorder: Recorder, tmp_path: Path) -> None:
    """As with ``--hang-after 0``."""
    run = str(tmp_path / "run")
    session = SimpleNamespace(recorder=recorder, spool=recorder.spool, run=run, world_size=1, document={})
    for _ in range(20):
        end(recorder)
    assert Writer(session)._copy(changed=False, ending=False)  # type: ignore[arg-type]
    assert Path(drain(recorder.spool.directory), STEPS_FILE).read_text().count('"step":') == 20


class Optimizer:
    """An object that can be held weakly."""


def test_the_id_of_a_freed_optimizer_names_no_other(recorder: Recorder) -> None:
    frame = sys._getframe()
    first, second = Optimizer(), Optimizer()
    starts.expect(first, True, frame)
    assert starts.optimizer_id == id(first)
    starts.expect(second, True, frame)
    del first
    assert starts.optimizer_id == id(second)
    del second
    assert starts.optimizer_id == 0


def test_what_only_the_page_of_a_dead_rank_has_is_copied_once(recorder: Recorder, monkeypatch) -> None:
    for _ in range(20):
        end(recorder)
    states = iter([State.UNKNOWN, State.OVER, State.OVER])
    monkeypatch.setattr(
        "ddpdoctor.rundir.liveness.writer_in", lambda folder: liveness.Writer(next(states), 0)
    )
    sizes = (
        os.stat(recorder.spool.directory),
        [os.path.getsize(each) for each in Path(recorder.spool.directory).glob("steps*")],
    )
    counts = []
    for _ in range(3):
        target = drain(recorder.spool.directory, with_stop_files=True)
        counts.append(Path(target, STEPS_FILE).read_text().count('"step":'))
    # Of one that may still run, nothing is copied that it will write itself.
    assert counts == [1, 20, 20]
    # It may have its log in its memory, which a shorter file would take away.
    assert sizes[1] == [os.path.getsize(each) for each in Path(recorder.spool.directory).glob("steps*")]


def test_a_dead_ranks_damaged_page_adds_no_step(recorder: Recorder, monkeypatch) -> None:
    for _ in range(20):
        end(recorder)
    monkeypatch.setattr("ddpdoctor.rundir.liveness.writer_in", lambda folder: liveness.Writer(State.OVER, 0))
    path = Path(recorder.spool.directory, HEARTBEAT_FILE)
    for content in (b"", b"x", os.urandom(4096), path.read_bytes()[:8] + b"\x7f" * 4088):
        path.write_bytes(content)
        target = drain(recorder.spool.directory, with_stop_files=True)
        assert Path(target, STEPS_FILE).read_text().count('"step":') == 1
    # The page is mapped: what the recorder reads of a file that is shorter now would end the process.
    recorder._written = recorder.step
