"""The annotation that explains a kind of work: the one of least length that covers half of it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ddpdoctor.measure.sourcelines import WindowSourceLines
from ddpdoctor.measure.sourcelines.from_windows import _MOST_WINDOWS, _evenly_spread
from ddpdoctor.measure.window import read_window
from ddpdoctor.trace import load_trace
from tests.trace.trace_files import document, event, write

KERNELS_US = (10_000, 30_000)


def annotation(name: str, ts: float, dur: float) -> dict[str, object]:
    return event(name, ts, dur, "user_annotation")


def lines_of(tmp_path, *annotations: dict[str, object]) -> WindowSourceLines:
    """A window of one step in which the host is busy with nothing but annotations between two kernels."""
    content = [
        annotation("ProfilerStep#3", 0, 50_000),
        *annotations,
        *(event("k", ts, 100, "kernel", 0, 7, device=0, stream=7) for ts in KERNELS_US),
    ]
    window = read_window(load_trace(write(tmp_path / "rank0.json", document(content))))
    idle = np.array([window.span[0] + 100_000]), np.array([window.span[1] - 100_000])
    return WindowSourceLines([window.with_set("host", idle)])


@pytest.mark.parametrize(
    ("annotations", "named"),
    [
        ([], None),
        ([("train", 0, 45_000)], "train"),
        ([("train", 0, 45_000), ("augment", 11_000, 15_000)], "augment"),
        ([("train", 0, 45_000), ("augment", 11_000, 5_000)], "train"),
        ([("train", 0, 45_000), *(("part", 10_500 + 2_000 * i, 1_500) for i in range(9))], "part"),
        ([("later", 31_000, 15_000)], None),
    ],
)
def test_the_shortest_that_covers_half_is_named(tmp_path, annotations, named):
    lines = lines_of(tmp_path, *(annotation(*of) for of in annotations))
    assert lines.operation(["host"], None) == named
    assert lines.operation(["host"], [0]) == named, "asked again, of the same rank"


def test_times_moved_to_another_clock_give_the_same_name(tmp_path):
    lines = lines_of(tmp_path, annotation("train", 0, 45_000), annotation("augment", 11_000, 15_000))
    moved = WindowSourceLines([window.shifted(-7_000_000_000) for window in lines.windows])
    assert moved.operation(["host"], None) == "augment"


MAIN = 7
LOG_LOSS, MAIN_LOOP = "train.py(71): log_loss", "train.py(117): main"


def waiting_window(tmp_path, *around: dict[str, object]):
    """10 ms of computation three times in a step, after each of which the host waits, then works for 10 ms (5 ms at the end)."""
    content = [event("ProfilerStep#3", 0, 60_000, "user_annotation", tid=MAIN), *around]
    for number, at in enumerate((0, 20_000, 40_000)):
        content += [
            event(
                "cudaLaunchKernel",
                at + 5_000,
                10,
                "cuda_runtime",
                tid=MAIN,
                External=0,
                correlation=number + 1,
            ),
            event("k", at + 5_015, 10_000, "kernel", 0, 7, device=0, stream=7, correlation=number + 1),
            event(
                "cudaStreamSynchronize", at + 5_100, 9_950, "cuda_runtime", tid=MAIN, correlation=number + 50
            ),
        ]
    return read_window(load_trace(write(tmp_path / "rank0.json", document(content))))


def test_a_call_that_waits_is_named_by_its_operator_and_its_line(tmp_path):
    around = [event(MAIN_LOOP, 0, 60_000, "python_function", tid=MAIN)]
    for at in (5_060, 25_060, 45_060):
        around += [
            event(LOG_LOSS, at, 10_000, "python_function", tid=MAIN),
            event("aten::item", at + 10, 9_985, "cpu_op", tid=MAIN),
            event("aten::_local_scalar_dense", at + 20, 9_970, "cpu_op", tid=MAIN),
        ]
    window = waiting_window(tmp_path, *around)
    lines = WindowSourceLines([window])
    assert lines.operation(["device_sync"], None) == "aten::item"
    assert [(w.file, w.line, w.function) for w in lines.syncs(["device_sync"])] == [
        ("train.py", 71, "log_loss")
    ]
    assert lines.syncs(["barrier"]) == [] and lines.operation(["barrier"], None) is None
    start, end = window.idle_after["device_sync"]
    assert (end - start).sum() == pytest.approx(25_000_000, rel=0.01), "the last step's too, up to its end"


def test_a_call_that_waits_outside_any_operator_is_named_itself(tmp_path):
    window = waiting_window(tmp_path)
    assert WindowSourceLines([window]).operation(["device_sync"], None) == "cudaStreamSynchronize"


def framed_window(tmp_path, *frames: dict[str, object]):
    """A copy and a kernel that the device runs 30 ms after they were launched, in frames of the script."""
    content = [event("ProfilerStep#3", 0, 60_000, "user_annotation", tid=MAIN), *frames]
    for number, (category, name) in enumerate(
        (("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"), ("kernel", "k"))
    ):
        launch = 1_000 + 10_000 * number
        content += [
            event("cudaMemcpyAsync", launch, 10, "cuda_runtime", tid=MAIN, correlation=number + 1),
            event(name, launch + 30_000, 5_000, category, 0, 7, device=0, stream=7, correlation=number + 1),
        ]
    return read_window(load_trace(write(tmp_path / "rank0.json", document(content))))


def test_work_of_the_device_has_the_lines_that_launched_it(tmp_path):
    """The host is in another function by the time that the device copies and computes."""
    frames = [
        event(MAIN_LOOP, 0, 60_000, "python_function", tid=MAIN),
        event("train.py(20): to_device", 500, 5_000, "python_function", tid=MAIN),
        event("train.py(30): forward", 10_500, 5_000, "python_function", tid=MAIN),
        event(LOG_LOSS, 30_000, 25_000, "python_function", tid=MAIN),
    ]
    lines = WindowSourceLines([framed_window(tmp_path, *frames)])
    steps = np.array([3])
    assert [w.line for w in lines.work(["copy"], None, steps)] == [20]
    assert [w.line for w in lines.work(["forward"], None, steps)] == [30]


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        (["train.py(117): main", "queue.py(154): get"], "train.py"),
        (["train.py(117): main", "concurrent/futures/thread.py(53): run"], "train.py"),
        (
            [
                "train.py(117): main",
                "torch/utils/data/dataloader.py(700): __next__",
                "threading.py(327): wait",
            ],
            "train.py",
        ),
        (["profile.py(12): main"], "profile.py"),
        (["train.py(117): main", "pytorch/model.py(9): forward"], "pytorch/model.py"),
        (["train.py(117): main", "multithreading.py(9): prefetch"], "multithreading.py"),
        (["train.py(117): main", "lib/torch/nn/functional.py(9): linear"], "train.py"),
    ],
)
def test_the_innermost_frame_that_is_not_of_a_library_is_named(tmp_path, frames, named):
    """Also where the script is named like a module of Python's, and nothing else is there."""
    nested = [event(name, i, 59_000 - 2 * i, "python_function", tid=MAIN) for i, name in enumerate(frames)]
    lines = WindowSourceLines([framed_window(tmp_path, *nested)])
    assert [w.file for w in lines.work(["copy"], None, np.array([3]))] == [named]


def test_of_many_ranks_some_evenly_spread_tell_the_lines() -> None:
    assert _evenly_spread(range(5)) == range(5)
    asked = _evenly_spread(range(1000))
    assert len(asked) == _MOST_WINDOWS and (asked[0], asked[-1]) == (0, 999)
    assert {b - a for a, b in pairwise(asked)} <= {32, 33}
