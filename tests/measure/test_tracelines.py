"""The annotation that explains a kind of work: the one of least length that covers half of it."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.tracelines import TraceLines
from ddpdoctor.measure.window import read_window
from ddpdoctor.trace import load_trace
from tests.trace.trace_files import document, event, write

KERNELS_US = (10_000, 30_000)


def annotation(name: str, ts: float, dur: float) -> dict[str, object]:
    return event(name, ts, dur, "user_annotation")


def lines_of(tmp_path, *annotations: dict[str, object]) -> TraceLines:
    """A window of one step in which the host is busy with nothing but annotations between two kernels."""
    content = [
        annotation("ProfilerStep#3", 0, 50_000),
        *annotations,
        *(event("k", ts, 100, "kernel", 0, 7, device=0, stream=7) for ts in KERNELS_US),
    ]
    window = read_window(load_trace(write(tmp_path / "rank0.json", document(content))))
    window.sets["host"] = (np.array([window.span[0] + 100_000]), np.array([window.span[1] - 100_000]))
    return TraceLines([window])


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
    lines.windows[0].shift(-7_000_000_000)
    assert lines.operation(["host"], None) == "augment"
