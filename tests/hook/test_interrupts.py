"""A signal handler of the job's may run in the midst of our code; what it raises is the job's."""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback

import pytest

from ddpdoctor.hook.guard import Part
from ddpdoctor.hook.patching import around, guarded
from ddpdoctor.rundir.stepevents import EventKind


class WorkerKilledError(RuntimeError):
    pass


def dies(number: int, frame: object) -> None:
    raise WorkerKilledError("worker (pid 7) is killed by signal: Killed.")


class Handler:
    def method(self, number: int, frame: object) -> None:
        dies(number, frame)

    __call__ = method


@pytest.fixture(
    params=[dies, Handler().method, functools.partial(dies), Handler()], ids=lambda one: type(one).__name__
)
def handled(request):
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


def strike(*_: object) -> None:
    """Code of ours, in which the signal comes."""
    os.kill(os.getpid(), signal.SIGUSR1)
    for _each in range(1000):
        pass


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def users_line(function) -> WorkerKilledError:
    with pytest.raises(WorkerKilledError) as caught:
        function()
    return caught.value


@pytest.mark.parametrize("place", ["before", "after", "after_an_error", "callback"])
def test_what_a_handler_raises_goes_to_the_job_from_its_own_line(handled, place) -> None:
    part = Part("a part of this test")

    def nothing(*_: object) -> int:
        return 1

    def fails(*_: object) -> None:
        raise KeyError(place)

    wrapped = {
        "before": lambda: around(nothing, part, strike),
        "after": lambda: around(nothing, part, nothing, strike),
        "after_an_error": lambda: around(fails, part, nothing, strike),
        "callback": lambda: guarded(part, strike),
    }[place]()
    error = users_line(wrapped)
    assert part.errors == 0
    assert "users_line" in names(error) and "strike" not in names(error) and "before" not in names(error)


def test_an_error_of_ours_is_ours_all_the_same(handled, capsys) -> None:
    part = Part("a part of this test")

    def breaks(*_: object) -> None:
        raise RuntimeError("our mistake")

    assert around(lambda: 5, part, breaks)() == 5
    assert part.errors == 1


def test_another_threads_error_is_no_handlers(handled, capsys) -> None:
    part = Part("a part of this test")
    callback = guarded(part, lambda: dies(0, None))
    thread = threading.Thread(target=callback)
    thread.start()
    thread.join()
    assert part.errors == 1


def test_an_error_of_ours_below_a_constructor_is_not_that_of_a_default_handler(capsys) -> None:
    """Python describes ``SIG_DFL`` as a member of an enumeration, whose class is called, too."""
    part = Part("a part of this test")
    assert around(lambda: 5, part, lambda *_: EventKind("no kind"))() == 5
    assert part.errors == 1
