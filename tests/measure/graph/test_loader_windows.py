"""How fast loaders make batches, as profiler traces of jobs on a device tell."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.graph import standalone_data_of_windows
from ddpdoctor.measure.taxonomy import INDEX, SyncKind
from ddpdoctor.measure.window import read_window
from ddpdoctor.trace import load_trace
from tests.measure.made import MS, Sync, cycles_of, work_array
from tests.trace.trace_files import document, event, write

NEXT = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
ALONE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def window_of(folder, rank, waits_ms, ends_ms, name=NEXT):
    """A host that waits so long for each of its batches, until these times."""
    content = [
        event(name, (end - wait) * 1e3, wait * 1e3, "user_annotation")
        for wait, end in zip(waits_ms, ends_ms, strict=True)
    ]
    content += [
        event(f"ProfilerStep#{n}", end * 1e3 - 90_000, 99_000, "user_annotation")
        for n, end in enumerate(ends_ms)
    ]
    content += [event("k", end * 1e3, 100, "kernel", 0, 7, device=0, stream=7) for end in ends_ms]
    return read_window(load_trace(write(folder / f"rank{rank}.json", document(content, rank=rank))))


def group_of(data_ms):
    """Steps of 100 ms: 60 of computation, 1 of transfer, the rest is the late rank's wait for data."""
    syncs = [Sync(SyncKind.GRADIENTS, "allreduce", (0, 1))]
    return cycles_of(syncs, work_array(6, 1, 2, forward=60.0, data=np.array([data_ms])), transfer_ms=1.0)


EVERY = np.arange(1, 8) * 100.0


def test_a_loader_nearly_as_slow_as_the_slowest_has_a_wait_of_its_own(tmp_path):
    """Rank 1 waits for data, rank 0 for rank 1; rank 0's host waits for its batches all the same, 97 ms for each."""
    windows = [window_of(tmp_path, 0, [50.0] * 7, EVERY * 0.97), window_of(tmp_path, 1, [60.0] * 7, EVERY)]
    group = group_of([0.0, 39.0])
    latent = standalone_data_of_windows(group, windows)
    assert latent[:, 0] == pytest.approx(36.0 * MS) and latent[:, 1] == pytest.approx(39.0 * MS)
    assert group.work[..., INDEX["data"]].sum(axis=1)[:, 0] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("waits_ms", "name"),
    [([0.1] * 7, NEXT), ([50.0, 0.1, 0.1, 40.0, 0.1, 0.1, 50.0], NEXT), ([50.0] * 7, ALONE)],
)
def test_a_loader_whose_batches_stand_ready_or_are_made_in_the_process_has_no_pace(tmp_path, waits_ms, name):
    windows = [
        window_of(tmp_path, 0, waits_ms, EVERY * 0.97, name),
        window_of(tmp_path, 1, [60.0] * 7, EVERY),
    ]
    latent = standalone_data_of_windows(group_of([0.0, 39.0]), windows)
    assert latent[:, 0] == pytest.approx(0.0) and latent[:, 1] == pytest.approx(39.0 * MS)


def test_without_any_pace_nothing_is_said(tmp_path):
    windows = [window_of(tmp_path, rank, [0.1] * 7, EVERY) for rank in (0, 1)]
    assert standalone_data_of_windows(group_of([0.0, 39.0]), windows) is None
