"""The sampling thread and its file."""

from __future__ import annotations

import json
import math
import os
import shutil
import time

import numpy as np
import pytest

from ddpdoctor.measure.telemetry import read_telemetry
from ddpdoctor.rundir import TELEMETRY_SCHEMA, Note, NoteCode
from ddpdoctor.telemetry.sampler import TelemetrySampler


def _sampler(directory, **options):
    return TelemetrySampler(directory, rank_pids=lambda: {0: os.getpid()}, **options)


def _wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def _record(directory, count, **options):
    sampler = _sampler(directory, host="node-1", **options)
    sampler.start()
    _wait_for(lambda: sampler.samples >= count)
    sampler.stop()
    return sampler


def test_the_file_and_its_columns(tmp_path):
    directory = tmp_path / "hosts" / "node-1"
    sampler = _record(directory, 3, interval_s=0.1)
    lines = [json.loads(line) for line in (directory / "telemetry.jsonl").read_text().splitlines()]
    assert (
        lines[0]["schema"] == TELEMETRY_SCHEMA
        and lines[0]["host"] == "node-1"
        and lines[0]["interval_s"] == 0.1
    )
    assert lines[0]["host_facts"]["cpu_count_logical"] == os.cpu_count()
    assert lines[-1]["closed"] is True and lines[-1]["samples"] == sampler.samples
    assert lines[-1]["cpu_ms_per_sample"] > 0

    found = read_telemetry(directory / "telemetry.jsonl")
    assert found.host == "node-1" and found.ranks == [0] and len(found.samples) == sampler.samples
    assert found.notes == sampler.notes
    assert found.samples[-1]["final"] is True
    t_ns, used = found.host_column("memory_used_bytes")
    assert t_ns.dtype == np.int64 and np.all(np.diff(t_ns) > 0) and np.all(used > 0)
    _, cpu = found.rank_column(0, "cpu_percent")
    assert math.isnan(cpu[0]) and not math.isnan(cpu[-1])
    assert np.all(np.isnan(found.gpu_column(7, "power_watts")[1])), "no such GPU"
    assert np.all(np.isnan(found.rank_column(9, "rss_bytes")[1])), "no such rank"


def test_gpus_of_a_host(tmp_path, stub_library, run_with_driver):
    code = f"""
from ddpdoctor.telemetry.sampler import TelemetrySampler
s = TelemetrySampler(Path({str(tmp_path)!r}), rank_pids=lambda: {{5: os.getpid()}}, interval_s=0.05)
s.start()
while s.samples < 2: time.sleep(0.02)
s.stop()
result = [note.text for note in s.notes]
"""
    notes = run_with_driver(stub_library(), code)
    found = read_telemetry(tmp_path / "telemetry.jsonl")
    assert [gpu["uuid"] for gpu in found.gpus] == ["GPU-0", "GPU-1"]
    assert found.gpu_column(1, "power_watts")[1] == pytest.approx([123.45] * len(found.samples))
    assert found.gpu_values(0, "throttle_reasons")[1][0][2] == "sw_power_cap"
    assert [note.text for note in found.notes] == notes == []


def test_sampling_thins_with_time(tmp_path):
    _record(tmp_path, 5, interval_s=0.02, thin_after_samples=2)
    notes = [note.text for note in read_telemetry(tmp_path / "telemetry.jsonl").notes]
    assert any("every 0.04 s" in note for note in notes) and any("every 0.08 s" in note for note in notes)
    _record(tmp_path / "bytes", 3, interval_s=0.02, thin_after_bytes=100)
    assert any(
        "every 0.04 s" in note.text for note in read_telemetry(tmp_path / "bytes" / "telemetry.jsonl").notes
    )


def test_pauses_are_uneven_so_that_no_step_is_always_met_at_the_same_moment(tmp_path):
    sampler = _sampler(tmp_path, interval_s=2.0)
    pauses = np.array([sampler.pause_s() for _ in range(4000)])
    assert 1.0 <= pauses.min() < 1.1 and 2.9 < pauses.max() <= 3.0
    assert pauses.mean() == pytest.approx(2.0, rel=0.03)


def test_a_vanished_directory_ends_sampling_with_one_note(tmp_path):
    directory = tmp_path / "host"
    sampler = _sampler(directory, interval_s=0.05)
    sampler.start()
    _wait_for(lambda: sampler.samples >= 1)
    before = len(sampler.notes)
    shutil.rmtree(directory)
    _wait_for(lambda: len(sampler.notes) > before)
    samples = sampler.samples
    sampler.stop()
    assert len(sampler.notes) == before + 1 and "Telemetry stopped" in sampler.notes[-1].text
    assert sampler.samples == samples


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_ends_sampling_with_one_note(tmp_path, monkeypatch):
    opened = os.open

    def full(path, flags, *more, **named):
        return opened("/dev/full" if str(path).endswith("telemetry.jsonl") else path, flags, *more, **named)

    monkeypatch.setattr(os, "open", full)
    sampler = _sampler(tmp_path, interval_s=0.05)
    sampler.start()
    _wait_for(lambda: sampler.notes)
    sampler.stop()
    assert len(sampler.notes) == 1 and "No space left" in sampler.notes[0].text


def test_a_directory_that_cannot_be_made_is_one_note(tmp_path):
    (tmp_path / "file").write_text("")
    sampler = _sampler(tmp_path / "file" / "host")
    sampler.start()
    sampler.stop()
    assert len(sampler.notes) == 1 and sampler.samples == 0


def test_stop_without_start(tmp_path):
    sampler = _sampler(tmp_path)
    sampler.stop()
    assert sampler.notes == []


def test_readable_after_a_kill_and_with_broken_lines(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    _record(tmp_path, 2, interval_s=0.05)
    whole = path.read_bytes().splitlines(keepends=True)
    samples = [line for line in whole if b'"ranks"' in line]
    path.write_bytes(whole[0] + samples[0] + b"{broken\n" + samples[1][:40])
    found = read_telemetry(path)
    assert len(found.samples) == 1 and found.header["schema"] == TELEMETRY_SCHEMA
    assert [note.text for note in found.notes] == [
        f"{path}: the last line is truncated and ignored.",
        f"{path}: 1 broken line left out.",
    ]


def test_a_missing_headless_or_foreign_file_is_a_note(tmp_path):
    missing = read_telemetry(tmp_path / "no.jsonl")
    assert missing.samples == [] and missing.notes == [
        Note(
            f"{tmp_path / 'no.jsonl'} cannot be read (No such file or directory): what its processors, memory and GPUs did is not known.",
            NoteCode.UNREADABLE,
        )
    ]
    path = tmp_path / "telemetry.jsonl"
    path.write_text('{"t_ns":5,"host":{"cpu_percent":1.5},"ranks":null,"gpus":null}\n')
    headless = read_telemetry(path)
    assert headless.host_column("cpu_percent")[1].tolist() == [1.5] and "no header" in headless.notes[0].text
    assert headless.ranks == [] and headless.gpus == []
    path.write_text('{"schema":"other/9"}\n{"t_ns":5,"host":{}}\n')
    foreign = read_telemetry(path)
    assert foreign.samples == [] and "other/9" in foreign.notes[0].text
