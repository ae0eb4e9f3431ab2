"""Constants are found by being there, are moved for everybody, and come back; one case through the whole command."""

from __future__ import annotations

import pytest

from ddpdoctor.measure.attribution import LATENESS
from tests.sweep.__main__ import main
from tests.sweep.constants import Constant, at, constants, looked_at, moved_number
from tests.sweep.jobs import Answer, answer_of, read, with_windows
from tests.sweep.page import page
from tests.sweep.sweep import Change, Swept, sweep_one


def test_each_field_of_a_rooms_tuning_is_a_constant():
    names = {constant.name for constant in constants()}
    assert {f"attribution.lateness.{field}" for field in LATENESS.__struct_fields__} <= names
    assert {"align.matching", "graph.segments", "costs.price"} <= {name.rpartition(".")[0] for name in names}
    assert not any(name.endswith(".kind") for name in names)


@pytest.mark.parametrize(
    ("value", "down", "up"),
    [(100, 70, 130), (2, 1, 3), (50_000.0, 35_000.0, 65_000.0), (0.5, 0.35, 0.65), (0.9, 0.87, 0.93), (1.02, 1.014, 1.026)],
)  # fmt: skip
def test_a_share_stays_a_share_and_a_count_moves_by_one(value, down, up):
    assert moved_number(value, -1) == pytest.approx(down)
    assert moved_number(value, 1) == pytest.approx(up)


def test_what_is_moved_comes_back_also_after_an_error():
    constant = Constant("attribution.lateness.persistent_share", LATENESS, "persistent_share")
    before = LATENESS.persistent_share
    with pytest.raises(ZeroDivisionError), at(constant, constant.moved(1)):
        assert LATENESS.persistent_share == pytest.approx(1.3 * before)
        raise ZeroDivisionError
    assert LATENESS.persistent_share == before


def test_a_job_is_moved_only_by_what_it_looks_at():
    prepared = read("generated", "trace-003-slow_forward")
    with looked_at(constants()) as names:
        before = answer_of(with_windows(prepared))
    assert "attribution.lateness.persistent_share" in names
    assert "costs.rare.fewest_cycles" not in names  # there is no log
    unread = next(constant for constant in constants() if constant.name not in names)
    with at(unread, 1e9):
        assert answer_of(prepared) == before


def test_answers_differ_by_finding_ranks_and_price():
    one = Answer("a/b", (1,), 10.0)
    assert one.differs(Answer("a/c", (1,), 10.0)) == "finding"
    assert one.differs(Answer("a/b", (2,), 10.0)) == "ranks"
    assert one.differs(Answer("a/b", (1,), 7.9)) == "price"
    assert one.differs(Answer("a/b", (1,), 8.1)) is None
    assert Answer(None).differs(Answer(None)) is None


def test_the_page_has_a_line_for_what_changed():
    change = Change(
        "costs.why.least", 1, "generated/x", "price", Answer("a/b", (1,), 1.0), Answer("a/b", (1,), 2.0)
    )
    text = page([Swept("generated/x", frozenset({"costs.why.least"}), (change,))], "One case.")
    assert "| `costs.why.least` | 0.25 | 1 jobs |  | 1 price |" in text
    assert "generated/x: a/b by 1, 1 ms → a/b by 1, 2 ms" in text


def test_a_case_is_swept_over_the_constants_that_it_looks_at(monkeypatch):
    """With the constants of one decision, of which one is read where nobody looks."""
    few = [c for c in constants() if c.name.startswith("attribution.lateness.")][:2]
    few += [c for c in constants() if c.name == "costs.rare.fewest_cycles"]
    monkeypatch.setattr("tests.sweep.sweep.constants", lambda: few)
    swept = sweep_one(("generated", "trace-003-slow_forward"))
    assert swept.looked_at <= {c.name for c in few[:2]} and swept.looked_at
    assert {change.constant for change in swept.changes} <= swept.looked_at


@pytest.mark.extended
def test_the_command_prints_the_page(capsys):
    assert main(["--part", "0.001", "--only", "generated", "-j", "1"]) == 0
    assert capsys.readouterr().out.startswith("<!-- Written by")
