"""The backward pass in a window: what it tells, and that the work grows with the window and not with its square."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.metrics.buckets import backward_of, reduces_after_backward
from ddpdoctor.measure.window import with_bucket_sizes
from tests.generator import SMALL, Config, generate
from tests.measure.traced import windows_of

FEW, MANY = 5, 20
MORE = 1.5 * MANY / FEW
"""Work in so many times the steps: next to proportional, while the square were 16 times as much."""


class Counted(np.ndarray):
    """Times that count how many of them are asked for, one by one or all at once."""

    asked = 0

    def __getitem__(self, at):
        Counted.asked += np.size(at) if isinstance(at, np.ndarray) else 1
        return np.asarray(self)[at]

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        plain = [np.asarray(value) if isinstance(value, Counted) else value for value in inputs]
        Counted.asked += max(np.size(value) for value in plain)
        return getattr(ufunc, method)(*plain, **options)


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def jobs(request, tmp_path_factory):
    """One rank's window of few steps, and one of many."""
    windows = []
    for steps in (FEW, MANY):
        folder = tmp_path_factory.mktemp(f"{request.param}-{steps}")
        generate(Config(**SMALL, backend=request.param, world_size=2, steps=steps), folder)
        windows.append(windows_of(folder)[0])
    return windows


def asked(window, measured):
    """How many times of collectives, whose sizes are unknown, are asked for."""
    counted = {name: getattr(window.collectives, name).view(Counted) for name in ("start", "end", "issued")}
    unknown = np.full(len(window.collectives.start), np.nan)
    watched = replace(window, collectives=replace(window.collectives, bytes=unknown, **counted))
    Counted.asked = 0
    measured(watched)
    return Counted.asked


@pytest.mark.parametrize(
    "measured",
    [backward_of, reduces_after_backward, lambda window: with_bucket_sizes([window], Config().bucket_bytes)],
    ids=["backward_of", "reduces_after_backward", "with_bucket_sizes"],
)
def test_the_work_grows_with_the_steps_and_not_with_their_square(jobs, measured):
    few, many = (asked(window, measured) for window in jobs)
    assert few > 0 and many <= MORE * few, (few, many)


def test_reductions_behind_all_computation_are_told_from_those_beside_it(jobs):
    window = jobs[1]
    nothing = replace(window, compute=(np.empty(0), np.empty(0)))
    steps = np.array([(start, end) for _, start, end in window.steps], float)
    assert reduces_after_backward(nothing)
    assert not reduces_after_backward(replace(window, compute=(steps[:, 0], steps[:, 1])))
    assert not reduces_after_backward(replace(nothing, steps=[]))


def test_the_backward_pass_does_not_depend_on_how_many_steps_show_it(jobs):
    few, many = (backward_of(window) for window in jobs)
    assert few is not None and many == pytest.approx(few, rel=0.2)
