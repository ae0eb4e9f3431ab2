"""What workers did, from what they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor import analyze
from ddpdoctor.measure.sourcelines import work_of_workers
from ddpdoctor.measure.steplog import read_rank_log
from ddpdoctor.rundir.reader import RunDirectory
from tests.measure.recorded import Job, record
from tests.measure.steplogs import log_of, span_of, write_lines

MS = 1_000_000


def definitions(pid: int) -> list[dict]:
    rows = [(0, 10, "__getitem__", None), (1, 20, "decode", 0), (2, 30, "collate", None)]
    return [
        {"where": number, "file": "data.py", "line": line, "function": name, "pid": pid}
        | ({} if by is None else {"by": by})
        for number, line, name, by in rows
    ]


def worked(pid, worker, batches, ms, rows, **more) -> dict:
    """``rows``: (line's number, whether it slept, ns that the sampling thread waited) of each sample."""
    line = {
        "pid": pid,
        "worker": worker,
        "of": 2,
        "t": [10**18, 10**18 + 2 * batches * ms * MS],
        "n": batches,
    }
    line |= {"d": batches * ms * MS, "q": batches * ms * ms, "cpu": 0, "runq": 0}
    line |= {
        "s": [[MS, where, where, int(slept)] for where, slept, _ in rows],
        "h": [held for *_, held in rows],
    }
    return line | more


def work(folder, lines):
    write_lines(log_of(folder, 1, "workers.jsonl"), lines)
    (record_of_1,) = [each for each in RunDirectory.open(str(folder)).ranks if each.rank == 1]
    log = read_rank_log(record_of_1)
    return log, work_of_workers(log)


@pytest.fixture
def folder(tmp_path):
    return record(tmp_path / "run", Job(data=30.0))


LOADER = {"loader": 0, "pids": [7, 8]}


def test_lines_by_time_with_their_way(folder):
    rows = [(1, False, 0)] * 30 + [(2, False, 0)] * 10
    _, found = work(folder, [LOADER, *definitions(7), worked(7, 0, 20, 10, rows)])
    assert [(where.line, where.share) for where in found.where] == [(20, 0.75), (30, 0.25)]
    assert [caller.line for caller in found.where[0].callers] == [10]
    assert found.where[0].process == "workers of rank 1" and found.where[0].samples == 30
    assert found.batch_ms == 10 and found.busy_share == 0.5 and found.slow is None


def test_the_librarys_function_that_a_line_is_in(folder):
    """Which of several transforms is slow shows only inside the line that calls them all."""
    library = {"where": 3, "file": "/x/site-packages/images/functional.py", "line": 465, "function": "resize"}
    line = worked(7, 0, 20, 10, [(1, False, 0)] * 30)
    for row in line["s"][:20]:
        row[2] = 3
    _, found = work(folder, [LOADER, *definitions(7), library | {"pid": 7}, line])
    (where,) = found.where
    assert where.line == 20 and (where.inside.line, where.inside.function) == (465, "resize")
    for row in line["s"][:12]:
        row[2] = 1
    _, found = work(folder, [LOADER, *definitions(7), library | {"pid": 7}, line])
    assert found.where[0].inside is None


def test_samples_weigh_the_time_that_they_stand_for(folder):
    """A long-lived worker is sampled less often later on."""
    early, late = worked(7, 0, 20, 10, [(1, False, 0)] * 20), worked(7, 0, 60, 10, [(2, False, 0)] * 20)
    _, found = work(folder, [LOADER, *definitions(7), early, late])
    assert [(where.line, where.share) for where in found.where] == [(30, 0.75), (20, 0.25)]


def test_a_sample_behind_the_holder_of_the_gil_is_the_holders(folder):
    rows = [(1, False, 6 * MS)] * 10 + [(2, False, 2 * MS)] * 10
    definition = definitions(7)
    definition[1]["function"] = definition[2]["function"] = "__getitem__"
    for each in definition:
        each.pop("by", None)
    _, found = work(folder, [LOADER, *definition, worked(7, 0, 20, 10, rows)])
    assert [(where.line, where.share) for where in found.where] == [(20, 1.0)]


def test_a_slow_worker_and_its_own_lines(folder):
    lines = [LOADER, *definitions(7), *definitions(8)]
    lines += [
        worked(7, 0, 40, 10, [(2, False, 0)] * 40),
        worked(8, 1, 40, 50, [(2, False, 0)] * 8 + [(1, True, 0)] * 32),
    ]
    _, found = work(folder, lines)
    assert (found.slow.number, found.slow.batch_ms, found.slow.others_ms) == (1, 50, 10)
    assert [(where.line, where.process) for where in found.where] == [(20, "worker 1 of rank 1")]
    assert found.where[0].share == pytest.approx(1.0)


def test_batches_that_scatter_make_no_worker_slow(folder):
    lines = [LOADER, *definitions(7), *definitions(8)]
    lines += [worked(7, 0, 40, 10, [], q=40 * 5000.0), worked(8, 1, 40, 20, [], q=40 * 9000.0)]
    _, found = work(folder, lines)
    assert found.slow is None and found.where == []


def test_computing_waiting_and_without_a_cpu(folder):
    _, found = work(folder, [LOADER, *definitions(7), worked(7, 0, 20, 10, [], cpu=60 * MS, runq=20 * MS)])
    assert (found.cpu_share, found.starved_share) == (0.3, 0.1)
    assert found.asleep_share == pytest.approx(0.6)
    _, found = work(folder, [LOADER, *definitions(7), worked(7, 0, 20, 10, [], cpu=None, runq=None)])
    assert found.asleep_share is None


def test_only_the_training_loader_counts(folder):
    others = [{"loader": 1, "pids": [9]}, *definitions(9), worked(9, 0, 20, 99, [(1, False, 0)] * 20)]
    _, found = work(folder, others)
    assert found is None
    _, found = work(folder, [*others, LOADER, worked(7, 0, 20, 10, [])])
    assert found.batch_ms == 10
    # Workers that began before the recording.
    _, found = work(folder, [*others, worked(7, 0, 20, 10, [])])
    assert found.batch_ms == 10


def test_broken_lines_are_counted_and_left_out(folder):
    bad = [{"pid": -1, "worker": 0}, {"pid": 7, "worker": 0, "n": -3}, {"pid": 7, "worker": 0, "s": [[1]]}]
    log, found = work(folder, [*bad, LOADER, *definitions(7), worked(7, 0, 20, 10, [(99, False, 0)] * 9)])
    assert found.batch_ms == 10 and found.where == []
    assert any("3" in note and "workers.jsonl" in note for note in log.notes)


def test_without_the_file_nothing_is_known(folder):
    (first, *_) = RunDirectory.open(str(folder)).ranks
    log = read_rank_log(first)
    assert work_of_workers(log) is None and log.notes == []
    assert span_of(folder, 0)


def test_they_lead_the_finding_of_the_loop_that_waits(tmp_path):
    folder = record(tmp_path / "run", Job(data=30.0))
    rows = [(1, True, 0)] * 30 + [(2, False, 0)] * 2
    for rank in (0, 1):
        write_lines(
            log_of(folder, rank, "workers.jsonl"), [LOADER, *definitions(7), worked(7, 0, 40, 60, rows)]
        )
    (finding,) = [each for each in analyze(str(folder)).findings if each.rule == "dataloader/starved"]
    line, loop = finding.where
    assert (line.line, line.process, loop.process) == (20, "workers", None)
    assert f"at {Path(loop.file).name}:{loop.line}" in finding.explanation
    assert "at data.py:20 in decode" in finding.explanation
