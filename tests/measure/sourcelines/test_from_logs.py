"""Source lines of what a step log records only as an event."""

from __future__ import annotations

import pytest

from tests.measure.recorded import Job, late_facts, measured, plant, record
from tests.measure.steplogs import log_of, span_of, steps_of, write_lines


def collections(folder, rank):
    """(start, end) epoch ns of the collections in a rank's log."""
    return [
        (line["t"][0] + event["s"], line["t"][0] + event["s"] + event["d"])
        for line in steps_of(folder, rank)
        for event in line.get("ev", [])
        if event["k"] == "gc"
    ]


def test_the_line_of_a_collection_is_sampled_right_after_it(tmp_path):
    """While Python collects no other thread runs, so no sample lies inside."""
    folder = record(tmp_path / "run", Job(extra=plant(1, every=2, gc=8.0)))
    lines = [{"where": 7, "file": "train.py", "line": 44, "function": "collect"}]
    lines += [{"t": end, "s": [[150_000, 7, 7]]} for _, end in collections(folder, 1)]
    lines += [{"where": 8, "file": "train.py", "line": 99, "function": "elsewhere"}]
    lines += [{"t": start, "s": [[-3_000_000, 8, 8]]} for start, _ in collections(folder, 1)]
    write_lines(log_of(folder, 1, "samples.jsonl"), lines)
    found, _ = measured(folder)
    cost = late_facts(found)["collection"]
    assert cost.ranks == [1] and [where.line for where in cost.where] == [44]


def test_the_line_of_a_collection_that_the_hook_names(tmp_path):
    folder = record(tmp_path / "run", Job(extra=plant(1, every=2, gc=8.0)))
    file = log_of(folder, 1)
    file.write_text(file.read_text().replace('"k": "gc"', '"k": "gc", "w": 2'))
    found, _ = measured(folder)
    assert [where.line for where in late_facts(found)["collection"].where] == [31]


HOST_MS = 6.0
TORCH = "/usr/lib/python3/site-packages/torch/optim/optimizer.py"


def write_samples(folder, rank, innermost="train.py", line=44):
    """A sample each 0.7 ms of the run, all at this line of the user's script."""
    lines = [{"where": 7, "file": "train.py", "line": line, "function": "main"}]
    lines += [{"where": 8, "file": innermost, "line": 1, "function": "inner"}]
    lines += [{"t": t, "s": [[0, 7, 8]]} for t in range(*span_of(folder, rank), 700_000)]
    write_lines(log_of(folder, rank, "samples.jsonl"), lines)


def host_line(tmp_path, ranks, **options):
    folder = record(tmp_path / "run", Job(host=HOST_MS))
    for rank in ranks:
        write_samples(folder, rank, **options)
    found, _ = measured(folder)
    assert found.facts.shared.host.ms_per_step == pytest.approx(HOST_MS, rel=0.05)
    return found.facts.shared.host.where


def test_the_time_of_a_line_is_that_of_its_samples(tmp_path):
    (where,) = host_line(tmp_path, range(4))
    assert where.line == 44 and where.python_ms == pytest.approx(HOST_MS, rel=0.1)


def test_what_torch_does_itself_is_no_python_of_the_loop_s(tmp_path):
    (where,) = host_line(tmp_path, range(4), innermost=TORCH)
    assert where.line == 44 and where.python_ms is None


def test_a_line_of_one_rank_is_not_common_to_all(tmp_path):
    assert host_line(tmp_path, [2]) == []


@pytest.mark.parametrize("lines", [(44, 45), (44, 44)])
def test_what_two_ranks_do_at_different_lines_is_not_common_to_all(tmp_path, lines):
    folder = record(tmp_path / "run", Job(world=2, host=HOST_MS))
    for rank, line in enumerate(lines):
        write_samples(folder, rank, line=line)
    found, _ = measured(folder)
    cost = found.facts.shared.host
    if lines[0] == lines[1]:
        assert cost.ms_per_step == pytest.approx(HOST_MS, rel=0.05)
        assert found.facts.late.host is None
    else:
        assert cost is None or cost.ms_per_step < 0.1 * HOST_MS
        late = found.facts.late.host
        assert late.ranks == [0, 1] and late.ms_per_step == pytest.approx(HOST_MS, rel=0.1)
        assert {where.line for where in late.where} == set(lines)


def test_a_line_that_also_calls_backward_is_not_where_all_ranks_run_python(tmp_path):
    """Two thirds of the host work are sampled at the line that calls backward (31), which is torch's own work around the pass."""
    folder = record(tmp_path / "run", Job(host=HOST_MS))
    for rank in range(4):
        lines = [
            {"where": number, "file": "train.py", "line": line, "function": "main"}
            for number, line in ((7, 44), (8, 31))
        ]
        moments = enumerate(range(*span_of(folder, rank), 700_000))
        lines += [{"t": t, "s": [[0, 7, 7] if place % 3 == 0 else [0, 8, 8]]} for place, t in moments]
        write_lines(log_of(folder, rank, "samples.jsonl"), lines)
    found, _ = measured(folder)
    assert [where.line for where in found.facts.shared.host.where] == [44]
    assert found.facts.shared.host.where[0].share == pytest.approx(1 / 3, rel=0.2)


def test_a_line_that_calls_backward_has_no_python_of_its_own(tmp_path):
    """It may be named where no other line is, but never as work that could be left out of a step."""
    (where,) = host_line(tmp_path, range(4), line=31)
    assert where.line == 31 and where.python_ms is None


def test_a_model_that_is_also_called_beside_the_forward_pass_is_named_by_that_call(tmp_path):
    """The forward pass runs the same line of the model (7)."""
    folder = record(tmp_path / "run", Job(host=HOST_MS))
    for rank in range(4):
        lines = [
            {"where": 7, "file": "train.py", "line": 44, "function": "dump"},
            {"where": 8, "file": "train.py", "line": 20, "function": "main"},
            *({"where": 10 + by, "file": "model.py", "line": 7, "function": "Net.forward", "by": by} for by in (7, 8)),
        ]  # fmt: skip
        forwards = [
            (line["t"][0] + event["s"], line["t"][0] + event["s"] + event["d"])
            for line in steps_of(folder, rank)
            for event in line.get("ev", [])
            if event["k"] == "fwd"
        ]
        for t in range(*span_of(folder, rank), 700_000):
            inside = 18 if any(start <= t < end for start, end in forwards) else 17
            lines.append({"t": t, "s": [[0, inside, inside]]})
        write_lines(log_of(folder, rank, "samples.jsonl"), lines)
    found, _ = measured(folder)
    assert [where.line for where in found.facts.shared.host.where] == [44]


@pytest.mark.parametrize(("function", "callers"), [("main", []), ("prepare", [90])])
def test_what_calls_the_training_loop_is_no_caller_of_work_in_it(tmp_path, function, callers):
    """The batches are taken in main: the line that calls it is none to move out of the step."""
    folder = record(tmp_path / "run", Job(host=HOST_MS))
    lines = [
        {"where": 6, "file": "train.py", "line": 90, "function": "<module>"},
        {"where": 7, "file": "train.py", "line": 44, "function": function, "by": 6},
    ]
    for rank in range(4):
        taken = [{"t": t, "s": [[0, 7, 7]]} for t in range(*span_of(folder, rank), 700_000)]
        write_lines(log_of(folder, rank, "samples.jsonl"), [*lines, *taken])
    found, _ = measured(folder)
    (where,) = found.facts.shared.host.where
    assert where.line == 44 and [line.line for line in where.callers] == callers
