"""Numbers, ranks and repetition in words."""

from __future__ import annotations

import pytest

from ddpdoctor.diagnose import rule_texts


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0.4214, "0.421 ms"),
        (9.0, "9 ms"),
        (46.31, "46.3 ms"),
        (1234.0, "1.23 s"),
        (12000.0, "12 s"),
        (999_600.0, "1000 s"),
    ],
)
def test_ms(given: float, text: str) -> None:
    assert rule_texts.ms(given) == text


@pytest.mark.parametrize(
    ("given", "text"), [(512, "512 bytes"), (26214400, "25 MiB"), (4.4e8, "420 MiB"), (3e12, "2.73 TiB")]
)
def test_size(given: float, text: str) -> None:
    assert rule_texts.size(given) == text


def test_percent_and_number() -> None:
    assert [rule_texts.percent(share) for share in (0.423, 0.051, 1.0)] == ["42 %", "5.1 %", "100 %"]
    assert [rule_texts.number(value) for value in (4.0, 4.27, 120.4)] == ["4", "4.3", "120"]


def test_the_article_before_a_number_fits() -> None:
    for number in ("8", "80", "8.2", "11", "11.4", "18"):
        assert rule_texts.render(f"a {number} ms step", {}) == f"an {number} ms step"
    for text in ("a 1 ms step", "a 110 ms step", "a 180 ms step", "a 62 ms step", "alpha 8 ms"):
        assert rule_texts.render(text, {}) == text


def test_what_one_cause_of_several_saves() -> None:
    cost = {"ms_per_step": 1.9, "alone_ms_per_step": 0.0, "remaining_ms_per_step": 3.9}
    assert "fixed alone, this saves nothing; fixed after them, 3.9 ms per step." in rule_texts.beside_others(
        cost
    )
    assert "saves 1 ms per step; fixed" in rule_texts.beside_others(cost | {"alone_ms_per_step": 1.0})


def test_count() -> None:
    assert [rule_texts.count(value, "thread") for value in (1.0, 16.0)] == ["1 thread", "16 threads"]


def test_ranks() -> None:
    assert rule_texts.ranks([1]) == "rank 1"
    assert rule_texts.ranks([1, 3, 5]) == "ranks 1, 3 and 5"
    assert rule_texts.ranks(None) == "all ranks"
    assert rule_texts.ranks([9, 8, 0, 10]) == "ranks 0 and 8 to 10"
    assert rule_texts.ranks(list(range(8, 16))) == "ranks 8 to 15"
    assert rule_texts.ranks([4, 5, 7]) == "ranks 4, 5 and 7"
    assert rule_texts.ranks(list(range(0, 40, 2))) == "ranks 0, 2, 4, 6, 8, 10 and 14 others"


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        ({"persistence": "always"}, "in every step"),
        ({"persistence": "always", "steps_hit": 21, "steps_seen": 21}, "in every step"),
        ({"persistence": "always", "steps_hit": 7, "steps_seen": 7}, "in all 7 steps examined"),
        ({"persistence": "always", "steps_hit": 6, "steps_seen": 7}, "in 6 of 7 steps examined"),
        ({"persistence": "periodic", "period_steps": 50}, "every 50 steps"),
        ({"persistence": "range", "first_step": 100, "last_step": 139}, "in every step from 100 to 139"),
        ({"persistence": "random", "steps_hit": 12, "steps_seen": 118}, "in 12 of 118 steps"),
        ({"persistence": "random"}, "in some steps"),
        ({"persistence": "always", "steps_seen": 1}, "in the one recorded step"),
        ({"stands_out_in": [22], "steps_seen": 7}, "in 1 of 7 recorded steps (step 22)"),
        (
            {
                "persistence": "range",
                "first_step": 3,
                "last_step": 5,
                "stands_out_in": [3, 4, 5],
                "steps_seen": 7,
            },
            "in 3 of 7 recorded steps (steps 3, 4 and 5)",
        ),
        (
            {"stands_out_in": [1, 3, 4, 7, 8], "steps_seen": 20},
            "in 5 of 20 recorded steps (steps 1, 3, 4, 7 and 1 more)",
        ),
    ],
)
def test_often(cost: dict[str, object], text: str) -> None:
    assert rule_texts.often(cost) == text


@pytest.mark.parametrize(
    ("now", "wait_ms", "mean_ms", "after_ms", "cores", "expected"),
    [
        (0, 42.0, 51.0, 9.0, None, 5),  # 42 ms for a batch, one wanted every 9 ms
        (2, 40.0, 60.0, 20.0, None, 6),  # two workers make one in 60 ms together: 120 ms each
        (0, 42.0, 51.0, 9.0, 3.0, 3),  # three cores are free
        (0, 99.0, 100.0, 0.0, None, 16),  # never more than 16 at once
        (8, 10.0, 50.0, 40.0, 2.0, 9),  # advice to add workers must add one
    ],
)
def test_workers(
    now: int, wait_ms: float, mean_ms: float, after_ms: float, cores: float | None, expected: int
) -> None:
    assert rule_texts.workers(now, wait_ms, mean_ms, after_ms, cores) == expected


def test_lines_are_named_without_their_folder() -> None:
    where = {"file": "/home/me/project/train.py", "line": 57, "function": "main"}
    assert rule_texts.at([where]) == " at train.py:57 in main"
    assert rule_texts.at({**where, "function": "<module>"}) == " at train.py:57"
    assert rule_texts.at([]) == rule_texts.at(None) == ""


def test_paragraphs_stay_and_lines_flow() -> None:
    assert rule_texts.render("one\n  two\n\nthree", {}) == "one two\n\nthree"
    assert rule_texts.render_snippet("if x:\n    {{ y }}\n", {"y": 1}) == "if x:\n    1"


@pytest.mark.parametrize(
    "text",
    [
        "One  line.",
        "Two\nlines and a stop.\n",
        "A paragraph.\r\n\r\nAnother,\rof two lines.\n\n\nA third.\n",
        "\n\n    indented\n      more\n\n",
        "a form feed \x0c and a separator \x1c are no ends of lines",
        "",
    ],
)
def test_a_text_with_nothing_to_fill_in_is_what_jinja_makes_of_it(text):
    whole = rule_texts._compile(text).render({})
    assert rule_texts.render_snippet(text, {}) == whole.strip("\n")
    paragraphs = [" ".join(part.split()) for part in whole.split("\n\n")]
    assert rule_texts.render(text, {}) == "\n\n".join(part for part in paragraphs if part)


def test_a_brace_alone_goes_to_jinja():
    assert rule_texts.render_snippet("{'a': 1} and {{ 1 + 1 }}{# unseen #}", {}) == "{'a': 1} and 2"


def test_all_ranks_are_those_that_were_recorded() -> None:
    assert rule_texts.ranks(None, {"ranks_seen": 1, "world_size": 300}) == "the recorded rank"
    assert rule_texts.ranks(None, {"ranks_seen": 5, "world_size": 8}) == "all 5 recorded ranks"
    assert rule_texts.ranks(None, {"ranks_seen": 2, "world_size": 8}) == "both recorded ranks"
    assert rule_texts.verb(None, "waits", "wait", {"ranks_seen": 1, "world_size": 8}) == "waits"
    rendered = rule_texts.render(
        "{{ none|ranks|sentence }} {{ none|verb('waits', 'wait') }}", {"job": {"ranks_seen": 1}}
    )
    assert rendered == "The recorded rank waits"


def test_where_no_line_is_known_the_annotation_says_where() -> None:
    line = {"file": "a/train.py", "line": 5, "function": "main"}
    assert rule_texts.at([line], "# sparse") == " at train.py:5 in main"
    assert rule_texts.at([], "# sparse arch") == ' in the annotation "# sparse arch"'
    assert rule_texts.at(None, "aten::item") == " in aten::item"
    assert rule_texts.at([], None) == ""


def test_code_for_the_ranks_at_hand() -> None:
    assert [rule_texts.condition(ranks) for ranks in ([2], [3, 1], None)] == [
        "rank == 2",
        "rank in (1, 3)",
        "rank == 0",
    ]


def test_everybody_is_who_was_recorded() -> None:
    said = {
        (8, 8): "All ranks wait",
        (8, None): "All ranks wait",
        (0, 8): "All ranks wait",
        (5, 8): "All 5 recorded ranks wait",
        (1, 8): "The recorded rank waits",
        (1, None): "The recorded rank waits",
        (1, 1): "The training process waits",
    }
    for (seen, world), text in said.items():
        assert rule_texts.all_ranks({"ranks_seen": seen, "world_size": world}, "wait", "waits") == text


def test_a_headline_inside_a_sentence() -> None:
    for headline, inside in (
        ("The GPUs of ranks 0 and 1", "the GPUs of ranks 0 and 1"),
        ("A rank is late", "a rank is late"),
        ("DDP reduces", "DDP reduces"),
        ("", ""),
    ):
        assert rule_texts.inside_sentence(headline) == inside
