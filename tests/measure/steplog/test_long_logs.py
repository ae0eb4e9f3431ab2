"""Step logs are read with a bound for the whole run, the same steps of all ranks, and odd lines cost themselves alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.graph import LEFT_OUT
from ddpdoctor.measure.steplog import read_limit, read_logs, read_rank_log, reading
from ddpdoctor.rundir import STEPS_FILE
from ddpdoctor.rundir.compaction import BLOCK_STEPS, thin
from ddpdoctor.rundir.owned import folder
from ddpdoctor.rundir.reader import RankRecord, RunDirectory
from ddpdoctor.telemetry.live import LiveRun
from tests.measure.recorded import EPOCH_NS, MS, Job, plant, record

STEPS, WORLD, MOST = 6_000, 2, 2_000


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    return record(
        tmp_path_factory.mktemp("long") / "run", Job(world=WORLD, steps=STEPS, extra=plant(1, data=20.0))
    )


@pytest.fixture
def bounded(monkeypatch):
    """A run that is longer than what is read of it."""
    monkeypatch.setattr(read_limit, "MOST_STEPS", MOST)


def logs_of(*runs: Path):
    return [log for found in read_logs([RunDirectory.open(str(run)) for run in runs]) for log in found.logs]


def numbers(log) -> list[int]:
    return [step.number for step in log.steps]


def test_a_log_within_the_bound_is_read_whole(long_run):
    for log in logs_of(long_run):
        assert numbers(log) == list(range(STEPS)) and log.left_out == 0


def test_of_a_long_log_the_first_the_newest_and_blocks_between_are_read(long_run, bounded):
    found = logs_of(long_run)
    kept = numbers(found[0])
    assert all(numbers(log) == kept for log in found)
    assert MOST * 0.75 <= len(kept) <= MOST and found[0].left_out == STEPS - len(kept)
    assert kept[: MOST // 8] == list(range(MOST // 8)) and kept[-MOST // 4 :] == list(
        range(STEPS - MOST // 4, STEPS)
    )
    middle = [number for number in kept if MOST // 8 <= number < STEPS - MOST // 4]
    assert len({number // BLOCK_STEPS for number in middle}) >= 5
    assert sum(b - a == 1 for a, b in pairwise(middle)) > 0.9 * len(middle)


def test_no_step_is_decoded_that_is_not_kept(long_run, bounded, monkeypatch):
    made = []

    class Counted(reading.LogRecord):
        def __post_init__(self):
            made.append(self.step)

    monkeypatch.setattr(reading, "LogRecord", Counted)
    kept = [number for log in logs_of(long_run) for number in numbers(log)]
    assert [number for number in made if number is not None] == kept


def test_many_ranks_share_the_bound(long_run, monkeypatch):
    monkeypatch.setattr(read_limit, "MOST_BYTES", 1 << 20)
    found = logs_of(long_run)
    read = sum(path.stat().st_size for path in long_run.rglob(STEPS_FILE)) * len(found[0].steps) / STEPS
    assert 0.5 * 2**20 < read < 1.1 * 2**20 and numbers(found[0]) == numbers(found[1])


def test_folders_of_one_job_have_one_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(read_limit, "MOST_STEPS", 700)
    job = Job(world=2, steps=3_000)
    runs = [record(tmp_path / f"host{rank}", job, missing=(1 - rank,)) for rank in range(2)]
    found = logs_of(*runs)
    assert len(found) == 2 and numbers(found[0]) == numbers(found[1]) and len(found[0].steps) < 3_000


def test_what_was_left_out_is_counted_and_has_its_reason(long_run, bounded):
    found = analyze([str(long_run)], Options(cache=False))
    assert found.verdict.rule == "dataloader/one-rank-late"
    assert found.steps.count == STEPS == found.steps.measured + sum(found.steps.set_aside.values())
    assert found.steps.set_aside[LEFT_OUT] > STEPS - MOST


def test_what_was_thinned_on_disk_is_counted_too(tmp_path):
    run = record(tmp_path / "run", Job(world=2, steps=STEPS, extra=plant(1, data=20.0)))
    for place in sorted((run / "ranks").iterdir()):
        with folder(str(place)) as handle:
            assert thin(handle, (place / STEPS_FILE).stat().st_size // 2)
    found = analyze([str(run)], Options(cache=False))
    assert found.verdict.rule == "dataloader/one-rank-late"
    assert found.steps.count == STEPS == found.steps.measured + sum(found.steps.set_aside.values())
    live = LiveRun(run)
    live.update()
    assert [rank.steps_total for rank in live.ranks.values()] == [STEPS, STEPS]


def test_samples_and_device_times_are_those_of_the_steps_that_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read_limit, "MOST_STEPS", 500)
    run = record(tmp_path / "run", Job(world=1, steps=2_000))
    (place,) = (run / "ranks").iterdir()
    steps = [json.loads(text) for text in (place / STEPS_FILE).read_text().splitlines()]
    steps = [step for step in steps if "step" in step]
    with (place / STEPS_FILE).open("a") as out:
        out.writelines(f'{{"device":{s["step"]},"at":5,"times":[["fwd",1],["end",9]]}}\n' for s in steps)
    with (place / "samples.jsonl").open("w") as out:
        out.write('{"where":1,"file":"train.py","line":3,"function":"main"}\n')
        out.writelines(f'{{"t":{s["t"][0]},"s":[[5,1],[9,1,1]]}}\n' for s in steps)
        out.write(f'{{"t":{steps[-1]["t"][1]},"s":[[7,1]]}}\n')  # after the last step
    (log,) = logs_of(run)
    assert set(log.device_times) == set(numbers(log)) and len(log.samples) == 2 * len(log.steps) + 1 < 1_100
    assert log.samples[-1, 0] == log.steps[-1].end_ns + 7 and log.samples_every_s == 1
    monkeypatch.setattr(read_limit, "MOST_SAMPLES", 300)
    (log,) = logs_of(run)
    seconds = {sample[0] // 10**9 for sample in log.samples}
    assert 0 < len(log.samples) <= 300 and {second % 2 for second in seconds} == {0}
    assert log.samples_every_s > 1


@pytest.mark.parametrize("at", [0, 5])
def test_too_many_samples_of_one_second_cost_themselves_alone(tmp_path, at):
    """A clock that was never set begins in second 0 of the epoch, which is an every-so-many-th second of any kind."""
    (tmp_path / STEPS_FILE).write_text('{"step":6,"t":[1,2]}\n')
    lines = ['{"where":1,"file":"train.py","line":3,"function":"main"}\n']
    lines += [f'{{"t":{at},"s":[[1,1],[2,1],[3,1]]}}\n'] * 200
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    log = read_rank_log(RankRecord(str(tmp_path), 0, {}), read_limit.ReadLimit(most_samples=100))
    assert len(log.samples) <= 100 and 1 in log.sample_where


def test_close_looks_are_weighed_by_the_looking_in_the_steps_that_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read_limit, "MOST_STEPS", 500)
    run = record(tmp_path / "run", Job(world=1, steps=2_000))
    (place,) = (run / "ranks").iterdir()
    steps = [json.loads(text) for text in (place / STEPS_FILE).read_text().splitlines()]
    with (place / "samples.jsonl").open("w") as out:
        out.write('{"where":1,"file":"train.py","line":3,"function":"main"}\n')
        out.writelines(
            f'{{"t":{s["t"][0]},"c":[[5,1,1]],"h":[5000000],"n":1000}}\n' for s in steps if "step" in s
        )
    (log,) = logs_of(run)
    assert len(log.burst_samples) == len(log.steps) < 550 and log.burst_ns == 1_000 * len(log.burst_samples)


def event(**fields: object) -> str:
    return json.dumps(
        {"step": 5, "t": [EPOCH_NS, EPOCH_NS + MS], "ev": [{"k": "fwd", "s": 0, "d": 1} | fields]}
    )


ODD = [
    *(
        f'{{"step":{number},"t":[1,2]}}'
        for number in (-1, 2**53 + 1, 2**64, 10**40, "NaN", '"7"', "1.5", "[3]")
    ),
    *(
        f'{{"step":5,"t":{times}}}'
        for times in ("[-1,2]", f"[1,{2**63}]", "[1,1e300]", "[1,2,3]", '["a","b"]', "[NaN,1]")
    ),
    *(event(**{name: value}) for name in ("s", "d", "w", "base") for value in (2**60, "x", 1.5)),
    *(event(d=-1), event(k=5), event(ready=[2**60]), event(also=[{}]), event(k="x" * 5_000), event(b=-1)),
    '{"step":5,"t":[1,2],"ev":[' + "[" * 100_000,
    '{"step":5,"x":' + "[" * 100_000,
    '{"step":5,"t":[1,2],"note":"' + "x" * (5 << 20) + '"}',
    '{"device":1,"at":5,"times":[["fwd"]]}',
    '{"device":1,"at":-5,"times":[["fwd",1]]}',
]


@pytest.mark.parametrize("line", ODD, ids=lambda line: line[:40])
def test_a_line_that_no_rank_writes_is_left_out_and_noted(tmp_path, line):
    (tmp_path / STEPS_FILE).write_text(line + '\n{"step":6,"t":[1,2]}\n')
    log = read_rank_log(RankRecord(str(tmp_path), 0, {}))
    assert numbers(log) == [6] and log.device_times == {}
    assert log.notes == [f"{tmp_path}/{STEPS_FILE}: 1 broken line left out."]


@pytest.mark.parametrize(
    "line",
    [
        '{"t":1,"s":[[]]}',
        '{"t":1,"s":[[1]]}',
        '{"t":1,"s":[["a",1]]}',
        '{"t":-1,"s":[[1,1]]}',
        '{"t":1,"s":5}',
    ],
)
def test_an_odd_sample_is_left_out_and_noted(tmp_path, line):
    (tmp_path / STEPS_FILE).write_text('{"step":6,"t":[1,2]}\n')
    (tmp_path / "samples.jsonl").write_text(line + '\n{"t":5,"s":[[1,1]]}\n')
    log = read_rank_log(RankRecord(str(tmp_path), 0, {}))
    assert log.samples.tolist() == [[6, 1, 1, 0]] and log.notes == [
        f"{tmp_path}/samples.jsonl: 1 broken line left out."
    ]


def test_a_rank_that_repeats_one_number_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(read_limit, "MOST_BYTES", 1 << 16)
    monkeypatch.setattr(read_limit, "_LEAST_BYTES", 1 << 16)
    (tmp_path / STEPS_FILE).write_text('{"step":6,"t":[1,2]}\n' * 100_000)
    log = read_rank_log(RankRecord(str(tmp_path), 0, {}))
    assert len(log.steps) < 15_000 and "lines of steps left out" in log.notes[0]


@pytest.mark.parametrize("first", [10**12, 2**53 - 60])
def test_steps_numbered_from_far_away_are_diagnosed_as_any_other(tmp_path, first):
    run = record(tmp_path / "run", Job(world=2, steps=40, extra=plant(1, data=20.0)))
    for path in run.rglob(STEPS_FILE):
        documents = [json.loads(text) for text in path.read_text().splitlines()]
        moved = [{**of, "step": of["step"] + first} if of.get("step", 0) >= 20 else of for of in documents]
        path.write_text("".join(json.dumps(document) + "\n" for document in moved))
    found = analyze([str(run)], Options(cache=False))
    assert found.verdict.rule == "dataloader/one-rank-late" and found.steps.count == 40
