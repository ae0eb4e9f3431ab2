"""Windows are never changed: what moves them, or learns of them, gives new ones."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from ddpdoctor.measure.align import align_and_match
from ddpdoctor.measure.graph import graph_of_windows
from ddpdoctor.measure.window import read_window, step_of, with_bucket_sizes
from ddpdoctor.trace import load_trace
from tests.generator import Config, generate
from tests.measure.traced import windows_of
from tests.trace.trace_files import BASE_NS, document, event, kernel, write

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


@pytest.mark.parametrize(("marked", "first"), [(True, 1_000_000), (False, 976_000)])
def test_the_first_step_begins_when_the_profiler_is_open(tmp_path, marked, first):
    """Opening it took 24 ms of the step in which it was opened; a trace without Kineto's mark does not show when it was."""
    mark = event("PyTorch Profiler (0)", 1_000_000, 60_000.0, "Trace", "Spans", "PyTorch Profiler")
    content = [*([mark] if marked else []), event("aten::mm", 1_001_000, 500.0), kernel(ts=1_002_000.0)]
    trace = load_trace(write(tmp_path / "rank0.json", document(content)))
    bounds = [
        (9, BASE_NS + 950_000_000, BASE_NS + 976_000_000),
        (10, BASE_NS + 976_000_000, BASE_NS + 1_030_000_000),
        (11, BASE_NS + 1_030_000_000, BASE_NS + 1_060_000_000),
    ]
    steps = read_window(trace, bounds).steps
    assert [step for step, _, _ in steps] == ([10, 11] if marked else [9, 10, 11])
    assert steps[-2:] == [(10, BASE_NS + 1000 * first, bounds[1][2]), bounds[2]]
