"""A small part of the regression net, and that it finds differences. ``make net`` compares all cases."""

from __future__ import annotations

import copy

import pytest

from tests.net.__main__ import main
from tests.net.answers import NOTHING, Difference, answer, differences, freeze, frozen
from tests.net.cases import GROUPS

QUICK = ("fixtures", GROUPS["fixtures"].names()), ("generated", GROUPS["generated"].names()[::20])


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in QUICK for name in names])
def test_a_case_gets_its_frozen_answer(group, name):
    found = list(differences(frozen(group)[name], answer(group, name)))
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("group", GROUPS)
def test_exactly_the_existing_cases_are_frozen(group):
    place = GROUPS[group].place
    if place is not None and not place.is_dir():
        pytest.skip("the cases are not here")
    assert frozen(group).keys() == set(GROUPS[group].names())


def test_each_difference_is_found_with_its_path():
    old = frozen("fixtures")["barrier"]
    new = copy.deepcopy(old)
    new["findings"][0]["where"][0]["line"] += 1
    new["facts"]["steps"]["mean_ms"] *= 1 + 1e-5
    new["verdict"]["rule"] = None
    del new["job"]["device"]
    new["notes"].append("new")
    paths = [difference.path for difference in differences(old, new)]
    assert sorted(paths) == [
        "facts.steps.mean_ms",
        "findings[0].where[0].line",
        "job.device",
        "notes.length",
        f"notes[{len(old['notes'])}]",
        "verdict.rule",
    ]


def test_only_floats_may_differ_by_rounding():
    assert not list(differences({"a": [1.0, "x"]}, {"a": [1.0 + 1e-9, "x"]}))
    assert list(differences({"a": 1}, {"a": 1.0})) == [Difference("a", 1, 1.0)]
    assert list(differences({"a": None}, {})) == [Difference("a", None, NOTHING)]
    assert str(Difference("a.b", 3, NOTHING)) == "a.b: 3 → (nothing)"


@pytest.mark.extended
def test_the_command_prints_the_differences(tmp_path, monkeypatch, capsys):
    changed = frozen("fixtures")
    changed["healthy"]["healthy"] = False
    changed["gone"] = {"error": "no such case"}
    monkeypatch.setattr("tests.net.answers.FROZEN", tmp_path)
    freeze("fixtures", changed)
    assert main(["--only", "fixtures", "-j", "1"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "fixtures/gone: 1 differences"
    assert said[2:4] == ["fixtures/healthy: 1 differences", "  healthy: False → True"]
    assert "2 differences in 2 cases" in said[4]
    assert main(["--only", "fixtures", "-j", "1", "--freeze"]) == 0
    assert main(["--only", "fixtures", "-j", "1", "rank0"]) == 0
    assert frozen("fixtures").keys() == set(GROUPS["fixtures"].names())
