"""Source lines of what a step log records only as an event."""

from __future__ import annotations

import json

from tests.measure.recorded import Job, late_facts, measured, plant, record


def rank_folder(folder, rank):
    return folder / "ranks" / f"{rank:05d}"


def collections(folder, rank):
    """(start, end) epoch ns of the collections in a rank's log."""
    lines = [
        json.loads(line) for line in (rank_folder(folder, rank) / "steps.jsonl").read_text().splitlines()
    ]
    return [
        (line["t"][0] + event["s"], line["t"][0] + event["s"] + event["d"])
        for line in lines
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
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (rank_folder(folder, 1) / "samples.jsonl").write_text(text)
    found, _ = measured(folder)
    cost = late_facts(found)["collection"]
    assert cost.ranks == [1] and [where.line for where in cost.where] == [44]


def test_the_line_of_a_collection_that_the_hook_names(tmp_path):
    folder = record(tmp_path / "run", Job(extra=plant(1, every=2, gc=8.0)))
    file = rank_folder(folder, 1) / "steps.jsonl"
    file.write_text(file.read_text().replace('"k": "gc"', '"k": "gc", "w": 2'))
    found, _ = measured(folder)
    assert [where.line for where in late_facts(found)["collection"].where] == [31]
