"""How much work each rank had in the steps of a window: only the step logs know."""

from __future__ import annotations

import numpy as np

from ddpdoctor.analysis import Options, load
from ddpdoctor.measure.graph import Recording, build_graphs
from ddpdoctor.measure.metrics import bucket_facts
from tests.generator import SMALL, Config, generate
from tests.measure.recorded import Job, record
from tests.measure.traced import windows_of


def recordings(tmp_path, **fields):
    """Logs of a job, and windows of devices, of the same two ranks and step numbers."""
    generate(Config(**SMALL, world_size=2, steps=4), tmp_path / "traces")
    run = record(tmp_path / "run", Job(world=2, steps=20, **fields))
    logs = [log for log in load([str(run)], Options(cache=False)).logs if log.steps]
    return logs, windows_of(tmp_path / "traces")


def test_samples_of_the_logs_are_those_of_the_window(tmp_path):
    logs, windows = recordings(tmp_path, batch=lambda rank: 32 + 16 * rank)
    graphs = build_graphs(logs, windows)
    assert graphs.recording is Recording.WINDOW
    for steps, samples in zip(graphs.primary.steps, (32, 48), strict=True):
        shared = np.isin(steps.steps, np.arange(20))
        assert shared.any() and (steps.samples[shared] == samples).all()
        assert np.isnan(steps.samples[~shared]).all()


def test_the_length_of_a_backward_pass_is_that_on_the_device(tmp_path):
    """The logs know when the host issued it."""
    logs, windows = recordings(tmp_path)
    graphs = build_graphs(logs, windows)
    both = bucket_facts(graphs.primary, graphs.log, graphs.window, logs, windows)
    alone = bucket_facts(graphs.primary, None, graphs.window, [], windows)
    assert alone.backward_ms is not None and both.backward_ms == alone.backward_ms
    assert both.first_ready_share == alone.first_ready_share
