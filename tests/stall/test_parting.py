"""The rank that left the common order, by the numbers that each rank wrote beside its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.measure.places import Where
from ddpdoctor.stall.calls import Call, due, first_call_difference

from .recorded import main_finding
from .test_calls import LINES, Called

EVALUATION, BACKWARD, BUFFERS = (
    ("all_reduce", 8),
    ("all_reduce of gradients", 17),
    ("broadcast of buffers", 16),
)


def test_one_call_before_the_first_step_shows_no_order():
    """DDP calls all_gather when it is built; then rank 0 alone calls one, where the others call their first barrier."""
    before = {"all_gather": {1}, "barrier": set()}
    assert due(before, 16) is None
    assert due({**before, "all_gather": {1, 8}}, 15) == "all_gather"


def test_what_comes_every_twentieth_time_is_due_at_its_twentieth() -> None:
    steps = {number for number in range(1, 63) if number not in (21, 42)}
    assert due({"evaluation": {21, 42}, "backward": steps}, 63) == "evaluation"
    assert due({"evaluation": {21, 42}, "backward": steps - {50}}, 50) == "backward"


@pytest.mark.parametrize(
    ("before", "answer"),
    [
        ({"new": set(), "usual": {1, 2, 3}}, "usual"),
        ({"first": {1, 4, 7}, "second": {2, 5, 8}}, "first"),
        ({"once": {5}, "usual": {6, 7, 8, 9}}, None),
        ({"irregular": {2, 5}, "usual": {3, 4, 6, 7, 8, 9}}, None),
        ({"new": set(), "newer": set()}, None),
        ({"a": {9}, "b": {9}}, None),
        ({}, None),
    ],
)
def test_nothing_is_due_that_the_past_does_not_show(before, answer) -> None:
    assert due(before, 10) == answer


def order(*calls: tuple[str, int], skip: int | None = None, first: int = 1, step: int = 0) -> list[Call]:
    """Calls of a rank one after the other, of which the last one has not returned; a step ends with each backward."""
    found: list[Call] = []
    for number, (name, line) in enumerate(each for n, each in enumerate(calls) if n != skip):
        where = Where("/job/train.py", line, "f")
        before = tuple(c.turn for c in reversed(found) if c.where == where and c.turn)[:2]
        own = "of " in name
        call = Call(name, "0", None if own else 4.0, where, True, step, first + number, before, is_by_ddp=own)
        found.append(call)
        step += name == BACKWARD[0]
    last = found.pop()
    return [
        *found,
        Call(**{name: getattr(last, name) for name in last.__struct_fields__} | {"returned": False}),
    ]


REGULAR = [*[BACKWARD] * 3, EVALUATION] * 3
"""Up to the third evaluation."""


def test_the_one_that_skipped_an_evaluation_of_two() -> None:
    found = first_call_difference({0: order(*REGULAR), 1: order(*REGULAR, BACKWARD, skip=len(REGULAR) - 1)})
    assert found is not None and (found.turn, found.odd) == (12, (1,))


def test_of_four_those_that_do_alike_are_right_even_in_the_first_one() -> None:
    first = [*[BACKWARD] * 3, EVALUATION]
    ranks = {rank: order(*first) for rank in (0, 1, 3)}
    found = first_call_difference({**ranks, 2: order(*first, BACKWARD, skip=3)})
    assert found is not None and found.odd == (2,)


def test_of_two_both_are_named_where_the_past_shows_nothing() -> None:
    irregular = [BACKWARD, EVALUATION, *[BACKWARD] * 5, EVALUATION]
    found = first_call_difference(
        {0: order(*irregular), 1: order(*irregular, BACKWARD, skip=len(irregular) - 1)}
    )
    assert found is not None and found.odd == (0, 1) and not found.is_decided


def test_an_evaluation_too_many() -> None:
    found = first_call_difference({0: order(*REGULAR, BACKWARD), 1: order(*REGULAR, EVALUATION)})
    assert found is not None and (found.turn, found.odd) == (13, (1,))


def test_a_broadcast_of_buffers_that_one_leaves_out() -> None:
    """Behind an evaluation, too, whose last time is forgotten."""
    steps = [BUFFERS, BACKWARD] * 4
    found = first_call_difference({0: order(*steps, BUFFERS), 1: order(*steps, BACKWARD)})
    assert found is not None and (found.turn, found.odd) == (9, (1,))
    steps.append(EVALUATION)
    found = first_call_difference({0: order(*steps, BUFFERS), 1: order(*steps, BACKWARD)})
    assert found is not None and (found.turn, found.odd) == (10, (1,))


def test_backward_passes_of_two_models_in_another_order() -> None:
    """As of a GAN: how much each of them reduces is not written down, but from which line it was called."""
    other = ("all_reduce of gradients", 27)
    steps = [BACKWARD, other] * 4
    found = first_call_difference({0: order(*steps, BACKWARD), 1: order(*steps, other)})
    assert found is not None and (found.turn, found.odd) == (9, (1,))


def test_the_last_call_of_a_step_skipped_brings_its_rank_to_the_next_one() -> None:
    step = [EVALUATION, ("all_gather", 9), BACKWARD]
    found = first_call_difference({0: order(*step * 3, *step[:2]), 1: order(*step * 3, step[0], BACKWARD)})
    assert found is not None and (found.turn, found.odd) == (11, (1,))


def test_a_call_that_went_unnoticed_is_where_its_rank_left() -> None:
    """Two metrics of one size: calling the first one twice shows at the second one only by the line."""
    step = [EVALUATION, ("all_reduce", 9), BACKWARD]
    found = first_call_difference({0: order(*step * 4), 1: order(*step * 3, step[0], step[0], step[1])})
    assert found is not None and (found.turn, found.odd) == (11, (1,))
    assert found.by_rank[1].where is not None and found.by_rank[1].where.line == 8


@pytest.mark.parametrize(
    "calls",
    [
        {0: order(*REGULAR), 1: order(*REGULAR)},
        {0: order(*REGULAR, BACKWARD), 1: order(*REGULAR)},
        {0: order(*REGULAR), 1: order(*[BACKWARD] * 3, first=40, step=40)},
        {0: order(*REGULAR), 1: []},
        # One counts a backward of its own in every step.
        {0: order(*[BACKWARD] * 9, EVALUATION), 1: order(*[BACKWARD] * 9, EVALUATION, first=4)},
        {},
    ],
    ids=["alike", "one ahead", "nothing in common", "nothing of one", "counts otherwise", "nobody"],
)
def test_no_difference_is_made_up(calls) -> None:
    assert first_call_difference(calls) is None


def test_groups_of_one_name_and_other_members_are_not_compared() -> None:
    def of(members: tuple[int, ...], *calls: tuple[str, int]) -> list[Call]:
        return [
            Call(**{n: getattr(call, n) for n in call.__struct_fields__} | {"members": members})
            for call in order(*calls)
        ]

    steps = [BACKWARD] * 3
    assert first_call_difference({0: of((0, 1), *steps, EVALUATION), 2: of((2, 3), *steps, BACKWARD)}) is None


class Numbered(Called):
    """The same of ranks that number their calls, and write down what DDP issues."""

    def order(self, rank: int, *lines: tuple[str, int], until: int) -> Numbered:
        """The last calls of a rank, of which the last has not returned and is number ``until``."""
        rows = []
        for back, (kind, line) in enumerate(reversed(lines)):
            fields: dict[str, Any] = {"k": kind, "pg": "0", "w": {v: k for k, v in LINES.items()}[line]}
            if kind == "coll":
                fields |= {"op": "all_reduce", "b": 4, "t": "float32"}
            turn = until - back
            last = {"p": turn - 21, "pp": turn - 42} if kind == "coll" else {"p": turn - 1, "pp": turn - 2}
            step = self.step - back
            rows.append({"open": int(not back), "call": turn, "n": turn, "step": step} | last | fields)
        path: Path = self.path / f"ranks/{rank:05d}/calls.jsonl"
        path.write_text("".join(json.dumps(row).rjust(256) + "\n" for row in rows))
        return self


def test_the_victim_of_a_skipped_evaluation_is_not_blamed(tmp_path) -> None:
    """Gloo aborts rank 0, which waits for the metric; rank 1 is in its backward pass, and loses the connection."""
    run = Numbered(tmp_path / "run")
    run.order(0, ("bwd", 50), ("bwd", 50), ("coll", 57), until=63)
    run.order(1, ("bwd", 50), ("bwd", 50), ("bwd", 50), until=63)
    run.aborted(0, 57, (1,))
    lost = "Read error [127.0.0.1]:52434: Connection reset by peer"
    run.raised(1, "RuntimeError", lost, line=50)
    diagnosis = analyze([str(run.path)])
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/different-collectives", [1], 50)
    headline = diagnosis.verdict.headline
    assert "rank 1 skips all_reduce of 4 bytes (float32) at train.py:57" in headline, headline
    assert "all_reduce of gradients at train.py:50" in headline
    assert "Rank 0 had called all_reduce of 4 bytes" in finding.explanation


def test_a_rank_killed_from_outside_is_no_rank_that_left(tmp_path) -> None:
    """The other one waits for it in a collective, and aborts."""
    run = Numbered(tmp_path / "run")
    run.order(0, ("bwd", 50), ("bwd", 50), ("coll", 57), until=63)
    run.order(1, ("bwd", 50), ("bwd", 50), until=62)
    run.aborted(0, 57, ()).ended(1, signal=9, step=run.step, seen_ns=1)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, 1 in (finding.ranks or [])) == ("hang/rank-died", True)


def test_an_abort_while_nothing_shows_a_difference_says_where_each_rank_was(tmp_path) -> None:
    run = Numbered(tmp_path / "run")
    run.order(0, ("bwd", 50), ("bwd", 50), ("coll", 57), until=63)
    run.order(1, ("bwd", 50), ("bwd", 50), until=62)
    finding = main_finding(analyze([str(run.aborted(0, 57, (1,)).path)]))
    assert finding.rule == "hang/rank-died"
    assert "Rank 1 had called all_reduce of gradients" in finding.explanation


def test_an_exception_of_a_ranks_own_is_the_cause(tmp_path) -> None:
    """It raises in its program while the other one waits in a collective; the numbers show no more than that."""
    run = Numbered(tmp_path / "run")
    run.order(0, ("bwd", 50), ("bwd", 50), ("coll", 57), until=63)
    run.order(1, ("bwd", 50), ("bwd", 50), ("bwd", 50), until=63)
    run.raised(1, "ValueError", "a bad sample").ended(1, code=1, step=run.step)
    assert main_finding(analyze([str(run.path)])).rule == "hang/rank-raised"


def test_a_layer_that_says_so_of_its_input_is_no_difference(tmp_path) -> None:
    run = Numbered(tmp_path / "run")
    for rank in range(2):
        run.order(rank, ("bwd", 50), ("bwd", 50), until=63)
    run.raised(0, "RuntimeError", "size mismatch, m1: [8 x 4], m2: [8 x 4]", line=50)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks) == ("hang/rank-raised", [0])


def test_gloo_says_that_sizes_differ_where_all_called_the_same(tmp_path) -> None:
    """Models that are not the same: nobody is named for it, least of all the rank that Gloo had raise."""
    run = Numbered(tmp_path / "run")
    for rank in range(2):
        run.order(rank, ("bwd", 50), ("bwd", 50), until=63)
    text = "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 34188 vs 4."
    diagnosis = analyze([str(run.raised(0, "RuntimeError", text, line=50).path)])
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks) == ("hang/different-collectives", None), diagnosis.verdict
    assert "Gloo had rank 0 raise" in finding.explanation
