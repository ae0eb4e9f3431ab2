"""The faults that settings can fix, and the page of the results."""

from __future__ import annotations

import ast
import json

import pytest

from .tries import REPAIRS, page, row, write_job

MEASURED = {
    "set": {"loader.num_workers": 4},
    "expected_ms": 12.0,
    "expected_range_ms": [11.0, 13.0],
    "verdict": "faster",
    "median_ms": 12.5,
    "trials_ms": [12.4, 12.6],
    "interval_ms": [12.2, 12.8],
    "change": -0.5,
    "baseline_mean_ms": None,
}


def outcome(twin_ms: float = 12.0, **changed: object) -> dict[str, object]:
    answer = {"baseline": {"median_ms": 25.0}, "variants": [{**MEASURED, **changed}]}
    twin = {"median": twin_ms, "mean": twin_ms + 5}
    return {"name": "a", "says": "b", "twin_ms": [twin, twin], "answer": answer, "error": []}


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)
def test_each_repair_is_valid_python_and_differs_from_its_twin(repair, tmp_path):
    write_job(repair, tmp_path)
    faulty, twin = (
        {file.name: file.read_text() for file in (tmp_path / name).iterdir()} for name in ("job", "twin")
    )
    changed = {name for name in faulty if faulty[name] != twin[name]}
    assert changed == {"plan.json"}
    programs = {name: text for name, text in faulty.items() if name.endswith(".py")}
    for text in programs.values():
        ast.parse(text)
    keys = json.loads(faulty["plan.json"])["extras"]
    asking = [
        name
        for name, text in programs.items()
        if any(f"amount({q}{key}{q})" in text for key in keys for q in "\"'")
    ]
    assert asking or repair.variables


def test_a_row_has_result_and_prediction():
    near = row(outcome())
    assert near is not None and near.fixed and near.kept
    far = row(outcome(twin_ms=11.0, interval_ms=[13.5, 14.0]))
    assert far is not None and not far.fixed and far.kept is False
    as_measured = row(outcome(median_ms=14.0))
    assert as_measured is not None and as_measured.fixed
    small = row(outcome(twin_ms=24.0))
    assert small is not None and small.fixed is None
    by_mean = row(outcome(baseline_mean_ms=30.0))
    assert by_mean is not None and (by_mean.as_it_is_ms, by_mean.twin_ms) == (30.0, 17.0)
    assert row({**outcome(), "answer": None}) is None


def test_the_page_counts_misses():
    text = page([outcome(), outcome(twin_ms=5.0), {**outcome(), "answer": None, "error": ["no"]}])
    assert "1 of 3 faults are fixed" in text
    assert "2 of 2 predictions are right" in text
    assert "0 of 0 faults are fixed" in page([outcome(twin_ms=24.0)])
    assert "1 cost less than 10%" in page([outcome(twin_ms=24.0)])
    assert "| a: b | | no | | | | no | |" in text
