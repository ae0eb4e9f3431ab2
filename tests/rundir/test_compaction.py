"""The step log of a long job is thinned on disk while it grows, and nothing else of it is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ddpdoctor.rundir import STEPS_FILE
from ddpdoctor.rundir.compaction import (
    BLOCK_STEPS,
    MOST_RANK_BYTES,
    DiskBudget,
    rank_budget,
    stream_end_of,
    thin,
    thinned_steps,
)
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.owned import folder
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.rundir.spool import Spool, make_spool_root
from ddpdoctor.telemetry.live import FileTail
from tests.launch.launched import make_run

BUDGET_BYTES = 1 << 20
EPOCH_NS = 1_760_000_000_000_000_000


def line(number: int, fill: int = 40) -> bytes:
    document = {"step": number, "t": [EPOCH_NS + number * 10**6, EPOCH_NS + (number + 1) * 10**6], "cpu": 1}
    return json.dumps({**document, "marks": ["x" * fill]}, separators=(",", ":")).encode() + b"\n"


def other(number: int) -> bytes:
    return b'{"where":%d,"file":"train.py","line":%d,"function":"main"}\n' % (number, number)


def numbers(path: Path) -> list[int]:
    documents = [json.loads(text) for text in path.read_bytes().splitlines()]
    return [document["step"] for document in documents if "step" in document]


@pytest.fixture
def recorded(tmp_path):
    """A run directory, the spool of its one rank, and the path of that rank's log."""
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    spool = Spool(root, 0, str(run))
    spool.write(STEPS_FILE, b'{"schema":"ddpdoctor.steps/2"}\n')
    yield run, spool, run / "ranks" / "00000" / STEPS_FILE
    spool.close()
    shutil.rmtree(root)


def record(spool: Spool, steps: range, budget: DiskBudget, every: int = 300) -> None:
    for number in steps:
        if number % 1000 == 0:
            spool.write(STEPS_FILE, other(number // 1000))
        spool.write(STEPS_FILE, line(number))
        if number % every == 0:
            drain(spool.directory, budget=budget)


def test_a_log_stays_within_its_budget_and_keeps_the_first_the_newest_and_blocks_between(recorded):
    _, spool, path = recorded
    record(spool, range(60_000), DiskBudget(BUDGET_BYTES))
    drain(spool.directory)
    assert path.stat().st_size < BUDGET_BYTES * 1.1
    kept = numbers(path)
    assert kept == sorted(set(kept)) and kept[:500] == list(range(500))
    assert kept[-1000:] == list(range(59_000, 60_000))
    blocks = [number // BLOCK_STEPS for number in kept if 5_000 < number < 50_000]
    assert len(set(blocks)) >= 3 and all(blocks.count(block) == BLOCK_STEPS for block in set(blocks))
    texts = path.read_text().splitlines()
    assert [json.loads(text)["where"] for text in texts if "where" in text] == list(range(60))
    gone = {n for first, last in thinned_steps(str(path.parent)) for n in range(first, last + 1)}
    assert gone.isdisjoint(kept) and gone | set(kept) == set(range(60_000)), "told to the step"


def test_a_budget_is_the_same_however_late_the_log_begins(tmp_path):
    budget = DiskBudget(BUDGET_BYTES)
    with folder(str(tmp_path)) as place:
        for _ in range(100):
            budget.keep(place)
        (tmp_path / STEPS_FILE).write_bytes(b"".join(line(n) for n in range(12_000)))
        assert (tmp_path / STEPS_FILE).stat().st_size > BUDGET_BYTES
        budget.keep(place)
    assert (tmp_path / STEPS_FILE).stat().st_size < BUDGET_BYTES


def test_ranks_that_thin_at_other_times_share_their_steps(tmp_path):
    kept = []
    for rank, fill in enumerate((40, 60)):
        place = tmp_path / str(rank)
        place.mkdir()
        (place / STEPS_FILE).write_bytes(b"".join(line(n, fill) for n in range(30_000)))
        with folder(str(place)) as handle:
            assert thin(handle, BUDGET_BYTES)
        kept.append(set(numbers(place / STEPS_FILE)))
    middle = [{number for number in of if 5_000 < number < 20_000} for of in kept]
    assert middle[0] >= middle[1] or middle[1] >= middle[0]


def test_a_reader_finds_copied_and_waiting_steps_of_a_thinned_log_once_each(recorded):
    run, spool, path = recorded
    record(spool, range(20_001), DiskBudget(BUDGET_BYTES))
    for number in range(20_001, 20_400):
        spool.write(STEPS_FILE, line(number))
    (found,) = RunDirectory.open(str(run)).ranks
    read = [json.loads(text) for text in found.lines(STEPS_FILE)]
    assert [document["step"] for document in read if "step" in document] == [
        *numbers(path),
        *range(numbers(path)[-1] + 1, 20_400),
    ]
    assert found.recorded_bytes > 20_400 * len(line(1))


def test_a_follower_sees_each_new_step_once_though_its_file_was_replaced(recorded):
    _, spool, path = recorded
    budget, tail, seen = DiskBudget(BUDGET_BYTES), FileTail(path), []
    for begin in range(0, 18_000, 500):
        record(spool, range(begin, begin + 500), budget)
        drain(spool.directory)
        seen += [
            document["step"] for document in map(json.loads, tail.read_new_lines()) if "step" in document
        ]
    assert stream_end_of(str(path)) > path.stat().st_size
    assert seen == list(range(18_000))


def test_a_line_that_is_not_whole_yet_stays_at_the_end(tmp_path):
    cut = line(20_000)[:30]
    (tmp_path / STEPS_FILE).write_bytes(b"".join(line(n) for n in range(20_000)) + cut)
    before = stream_end_of(str(tmp_path / STEPS_FILE))
    with folder(str(tmp_path)) as handle:
        assert thin(handle, BUDGET_BYTES)
    data = (tmp_path / STEPS_FILE).read_bytes()
    assert data.endswith(line(19_999) + cut) and stream_end_of(str(tmp_path / STEPS_FILE)) == before


@pytest.mark.parametrize("stops_after", [0, 25])
def test_who_needs_the_log_interrupts_thinning_and_it_stays_as_it_was(tmp_path, stops_after):
    data = b"".join(line(n) for n in range(20_000))
    (tmp_path / STEPS_FILE).write_bytes(data)
    asked = iter(range(100))
    with folder(str(tmp_path)) as handle:
        assert not thin(handle, BUDGET_BYTES, lambda: next(asked) < stops_after)
    assert (tmp_path / STEPS_FILE).read_bytes() == data and os.listdir(tmp_path) == [STEPS_FILE]


def test_a_kill_in_the_middle_loses_nothing(tmp_path):
    data = b"".join(line(n) for n in range(20_000))
    (tmp_path / STEPS_FILE).write_bytes(data)
    looks = 0

    def killed() -> bool:
        nonlocal looks
        looks += 1
        if looks == 40:
            os._exit(9)
        return True

    pid = os.fork()
    if pid == 0:
        with folder(str(tmp_path)) as handle:
            thin(handle, BUDGET_BYTES, killed)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert (tmp_path / STEPS_FILE).read_bytes() == data and len(os.listdir(tmp_path)) == 2
    with folder(str(tmp_path)) as handle:
        assert thin(handle, BUDGET_BYTES)
    assert os.listdir(tmp_path) == [STEPS_FILE]


@pytest.mark.parametrize(
    "head",
    [
        b'{"thinned":{"shift":-5,"every":1}}',
        b'{"thinned":{"shift":1e9,"every":1}}',
        b'{"thinned":{"shift":NaN,"every":2}}',
        b'{"thinned":{"shift":%d,"every":2}}' % 2**70,
        b'{"thinned":' + b"[" * 3000,
        b'{"thinned":5}',
    ],
)
def test_a_head_that_no_rank_writes_counts_for_nothing(tmp_path, head):
    path = tmp_path / STEPS_FILE
    path.write_bytes(b'{"schema":"x"}\n' + head + b'\n{"left_out":[[0,9]]}\n')
    assert stream_end_of(str(path)) == path.stat().st_size and thinned_steps(str(tmp_path)) == []


def test_odd_numbers_of_steps_left_out_are_passed_over(tmp_path):
    pairs = f"[[0,9],[5,12],[20,19],[-3,4],[1.5,2],[7,1e99],[0,{2**70}]]"
    lines = ['{"schema":"x"}', '{"thinned":{"shift":7,"every":2}}', f'{{"left_out":{pairs}}}', ""]
    (tmp_path / STEPS_FILE).write_text("\n".join(lines))
    assert thinned_steps(str(tmp_path)) == [(0, 12)]


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / STEPS_FILE)
    assert stream_end_of(str(tmp_path / STEPS_FILE)) == 0 and thinned_steps(str(tmp_path)) == []


def test_many_ranks_share_what_a_run_may_take():
    assert rank_budget(2) == MOST_RANK_BYTES > rank_budget(512) > rank_budget(2_000) == rank_budget(10**6)
