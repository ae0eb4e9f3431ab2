"""Windows without any collectives, for tests whose collectives are in graphs."""

from __future__ import annotations

import json

import pytest

from tests.measure.traced import windows_of


@pytest.fixture(scope="session")
def windows(tmp_path_factory):
    """Of two ranks, with an operator each and no collectives: those are in the graphs."""
    folder = tmp_path_factory.mktemp("traces")
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.0}
    for rank in range(2):
        text = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": [event]}
        (folder / f"rank{rank}.json").write_text(json.dumps(text))
    return windows_of(folder)
