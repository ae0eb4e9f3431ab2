"""Lines that no version of ours wrote: passed over by who follows a run, told by who reads it."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from ddpdoctor.measure.telemetry import read_telemetry
from ddpdoctor.telemetry.live import LiveRun
from ddpdoctor.telemetry.prometheus import exposition

SAMPLE = {"t_ns": 10**18, "host": {"cpu_percent": 5.0}, "ranks": {}, "gpus": []}
GPU = {"index": 0, "power_watts": 100.0}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "ranks/00000").mkdir(parents=True)
    (tmp_path / "hosts/h").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text('{"schema":"ddpdoctor.run/1"}')
    (tmp_path / "ranks/00000/rank.json").write_text('{"rank":0,"host":"h"}')
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        b'{"step":1,"t":[5]}',
        b'{"step":1,"t":[5,"x"]}',
        b'{"step":1,"t":[9,5]}',
        b'{"step":18446744073709551616,"t":[1,2]}',
        b'{"step":1,"t":[1,1e400]}',
        b'{"step":1,"t":[1,NaN]}',
        b'{"step":1,"t":[1,99999999999999999999]}',
        b'{"step":1,"t":[1,2],"ev":5}',
        b'{"step":1,"t":[1,2],"ev":[{"k":"data","d":"x"}]}',
        b'{"step":1,"t":[1,2],"ev":[{"k":"bwd","sync":true,"ready":[[]],"base":1}]}',
        b"[" * 100_000,
        b'{"note":"\xff"}',
    ],
)
def test_a_step_that_cannot_be_is_passed_over(run, line):
    good = b'{"step":0,"t":[1,2]}\n', b'{"step":2,"t":[2,4],"ev":[{"k":"data","d":1,"n":8,"s":0}]}\n'
    (run / "ranks/00000/steps.jsonl").write_bytes(good[0] + line + b"\n" + good[1])
    live = LiveRun(run)
    live.update()
    assert [step.number for step in live.ranks[0].steps] == [0, 2]
    assert live.ranks[0].steps[1].samples == 8
    assert 'ddpdoctor_steps_total{host="h",rank="0"} 3.0' in exposition(live, "h")


@pytest.mark.parametrize(
    "changed",
    [
        {"gpus": 5},
        {"gpus": [{}]},
        {"gpus": [{"index": "0", "power_watts": []}]},
        {"gpus": [{**GPU, "power_watts": [1]}]},
        {"gpus": [{**GPU, "throttle_reasons": [{}]}]},
        {"gpus": [{**GPU, "pcie_width": "x"}]},
        {"ranks": {"x": {}}},
        {"ranks": {"0": 5}},
        {"ranks": {"0": {"cpu_percent": "x"}}},
        {"host": [5]},
        {"host": {"cpu_percent": {}}},
    ],
)
def test_a_part_of_a_sample_that_cannot_be_is_left_out(run, changed):
    header = {"schema": "ddpdoctor.telemetry/2", "host": "h", "gpus": [GPU]}
    file = run / "hosts/h/telemetry.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (header, {**SAMPLE, **changed}, SAMPLE)))
    found = read_telemetry(file)
    assert len(found.samples) == 2 and found.ranks == []
    assert np.isnan(found.gpu_column(0, "power_watts")[1]).all()
    assert f"{file}: {next(iter(changed))} of some samples" in found.notes[0].text
    live = LiveRun(run)
    live.update()
    assert exposition(live, "h")


@pytest.mark.parametrize("t_ns", [-1, 2**62, 2**64, 1.5, "x", None, True])
def test_a_sample_at_no_moment_is_none(run, t_ns):
    file = run / "hosts/h/telemetry.jsonl"
    file.write_text('{"schema":"ddpdoctor.telemetry/2"}\n' + json.dumps({**SAMPLE, "t_ns": t_ns}) + "\n")
    assert read_telemetry(file).samples == []


@pytest.mark.parametrize(
    "field",
    [
        {"host": 5},
        {"host_facts": {"cpu_count_usable": "x"}},
        {"gpus": [{"index": None}]},
        {"started_ns": 1e30},
    ],
)
def test_a_field_of_the_header_that_cannot_be_is_left_out(run, field):
    file = run / "hosts/h/telemetry.jsonl"
    file.write_text(
        json.dumps({"schema": "ddpdoctor.telemetry/2", **field}) + "\n" + json.dumps(SAMPLE) + "\n"
    )
    found = read_telemetry(file)
    assert found.header.get(next(iter(field))) is None and len(found.samples) == 1
    assert "cannot have" in found.notes[0].text


def test_a_fifo_and_a_link_are_not_read(run, tmp_path):
    file = run / "hosts/h/telemetry.jsonl"
    os.mkfifo(file)
    assert "no regular file" in read_telemetry(file).notes[0].text
    LiveRun(run).update()
    file.unlink()
    (tmp_path / "other").write_text('{"schema":"ddpdoctor.telemetry/2"}\n')
    file.symlink_to(tmp_path / "other")
    assert "it is a link" in read_telemetry(file).notes[0].text


def test_programs_without_a_number_are_passed_over_and_names_are_made_plain(tmp_path):
    """A process gives itself a name of any bytes, and a file may have been edited."""
    odd = [{"cores": 1.0}, {"name": "x", "cores": None, "processes": 1}, {"name": "y", "cores": 1.0}]
    named = {"name": "a`b\n#  <b>\x1b[31m" + "x" * 99, "cores": 0.9, "processes": 1}
    lines = [{"schema": "ddpdoctor.telemetry/2", "host": "h"}, {**SAMPLE, "others": [*odd, named]}, SAMPLE]
    (tmp_path / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, programs = read_telemetry(tmp_path / "telemetry.jsonl").other_programs()
    assert programs == [[{**named, "name": ("a\ufffdb # <b>\ufffd[31m" + "x" * 99)[:64]}], None]
