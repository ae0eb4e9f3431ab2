"""Windows are never changed: what moves them, or learns of them, gives new ones."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from ddpdoctor.measure.align import align_and_match
from ddpdoctor.measure.graph import graph_of_windows
from ddpdoctor.measure.window import step_of, with_bucket_sizes
from tests.generator import Config, generate
from tests.measure.traced import windows_of

SECOND = 1_000_000_000
BUCKETS = Config(backend="gloo", steps=4)


def contents(window):
    """Everything that stands in a window but its trace, as plain values."""

    def plain(value):
        if isinstance(value, msgspec.Struct):
            return {name: plain(of) for name, of in msgspec.structs.asdict(value).items() if name != "trace"}
        if isinstance(value, dict):
            return {name: plain(of) for name, of in value.items()}
        if isinstance(value, tuple | list):
            return [plain(of) for of in value]
        return value.tolist() if isinstance(value, np.ndarray) else value

    return repr(plain(window))


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def windows(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    generate(dataclasses.replace(BUCKETS, backend=request.param), folder)
    return windows_of(folder)


def test_nothing_changes_the_windows_that_it_is_given(windows):
    before = [contents(window) for window in windows]
    sized = with_bucket_sizes(windows, BUCKETS.bucket_bytes)
    aligned, matched = align_and_match(sized)
    _, seen = graph_of_windows(sized)
    assert len(matched.rows) and len(aligned) == len(seen) == len(windows)
    assert [contents(window) for window in windows] == before
    assert [set(window.sets) - {"unmatched", "unseen"} for window in seen] == [set(w.sets) for w in windows]


def test_a_moved_window_is_the_same_window_later(windows):
    window = windows[0]
    moved = window.shifted(SECOND)
    assert moved.shifted_ns == window.shifted_ns + SECOND and moved.span[0] == window.span[0] + SECOND
    assert (moved.collectives.issued - window.collectives.issued == SECOND).all()
    starts = np.array([start for _, start, _ in moved.steps])
    assert step_of(moved, starts).tolist() == [number for number, _, _ in window.steps]
    assert contents(moved.shifted(-SECOND)) == contents(window)


def test_only_reductions_without_sizes_get_those_of_the_buckets(windows):
    sized = with_bucket_sizes(windows, BUCKETS.bucket_bytes)
    for before, after in zip(windows, sized, strict=True):
        if before.on_device:
            assert after is before
            continue
        reduced = np.array([kind == "gradients" for kind in after.collectives.kind])
        assert np.isnan(before.collectives.bytes).all() and np.isnan(after.collectives.bytes[~reduced]).all()
        assert set(after.collectives.bytes[reduced]) == set(map(float, BUCKETS.bucket_bytes))
