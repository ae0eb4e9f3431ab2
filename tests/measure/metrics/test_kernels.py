"""Devices as facts, from what ran on them."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.measure.metrics import gpu_facts
from tests.measure.traced import windows_of


@pytest.mark.parametrize("name", ["Memcpy HtoD (Pageable -> Device)", "Memcpy M2D (Pageable -> Device)"])
def test_copies_are_found_by_any_name(name, tmp_path):
    """XPU calls the host's memory M."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 5.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": name, "pid": 0, "tid": 7, "ts": 9.0, "dur": 2000.0},
    ]
    events[1]["args"] = {"bytes": 4096}
    text = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(text))
    facts = gpu_facts(windows_of(tmp_path), [], {})
    assert (facts.copy_bytes_per_step, facts.pageable_copy_ms) == (4096.0, pytest.approx(2.0))
