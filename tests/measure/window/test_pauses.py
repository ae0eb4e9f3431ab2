"""Checkpoints and garbage collections in a window, by what Python's stacks say."""

from __future__ import annotations

import pytest

from ddpdoctor.measure.window import read_window
from ddpdoctor.trace import load_trace
from tests.trace.trace_files import document, event, write

SAVE_US, SAVE_LENGTH_US = 12_000, 20_000


def frame(name, ts, dur, tid=7):
    return event(name, ts, dur, "python_function", tid=tid)


def kernel(ts, dur):
    return event("k", ts, dur, "kernel", 0, 7, device=0, stream=7)


def sets_of(tmp_path, *more):
    """Sets, in whole ms, of a rank whose device computes up to 10 ms and from 40 ms on, each for 10 ms."""
    content = [
        event("ProfilerStep#3", 0, 60_000, "user_annotation"),
        kernel(0, 10_000),
        kernel(40_000, 10_000),
        *more,
    ]
    window = read_window(load_trace(write(tmp_path / "rank0.json", document(content))))
    origin = window.span[0]
    return {
        name: [(round((a - origin) / 1e6), round((b - origin) / 1e6)) for a, b in zip(*of, strict=True)]
        for name, of in window.sets.items()
    }


@pytest.mark.parametrize(
    "name",
    [
        "torch/serialization.py(944): save",
        "/opt/env/lib/python3.12/site-packages/torch/serialization.py(917): save",
        "torch/serialization.py(801): _legacy_save",
        "torch/distributed/checkpoint/state_dict_saver.py(73): save",
        "torch/distributed/checkpoint/state_dict_saver.py(231): async_save",
        "safetensors/torch.py(261): save_file",
    ],
)
def test_a_save_is_a_checkpoint(name, tmp_path):
    inner = frame("torch/serialization.py(1183): _save", SAVE_US + 100, SAVE_LENGTH_US - 200)
    assert sets_of(tmp_path, frame(name, SAVE_US, SAVE_LENGTH_US), inner)["checkpoint"] == [(12, 32)]


@pytest.mark.parametrize(
    "name",
    [
        "torch/serialization.py(1487): load",
        "torch/serialization.py(1249): persistent_id",
        "train.py(90): save",
        "torch/distributed/checkpoint/state_dict_loader.py(60): load",
    ],
)
def test_other_frames_are_none(name, tmp_path):
    assert sets_of(tmp_path, frame(name, SAVE_US, SAVE_LENGTH_US))["checkpoint"] == []


def test_only_what_the_device_waits_for_counts(tmp_path):
    save = frame("torch/serialization.py(944): save", 5_000, 40_000)
    assert sets_of(tmp_path, save)["checkpoint"] == [(10, 40)]


def test_a_save_in_another_thread_stops_nobody(tmp_path):
    assert (
        sets_of(tmp_path, frame("torch/serialization.py(944): save", 12_000, 9_000, tid=8))["checkpoint"]
        == []
    )


@pytest.mark.parametrize("name", ["Python GC", "<built-in function collect>"])
def test_a_collection(name, tmp_path):
    found = sets_of(tmp_path, frame(name, 12_000, 9_000))
    assert found["collection"] == [(12, 21)] and found["checkpoint"] == []


def test_a_collection_within_a_save_is_part_of_it(tmp_path):
    found = sets_of(
        tmp_path,
        frame("torch/serialization.py(944): save", SAVE_US, SAVE_LENGTH_US),
        frame("Python GC", 15_000, 5_000),
    )
    assert found["checkpoint"] == [(12, 32)] and found["collection"] == []
