"""What ranks have in common is asked once and kept once, and is the same as if it were not."""

from __future__ import annotations

import numpy as np

from ddpdoctor.trace import classify, load_trace, load_traces
from ddpdoctor.trace.columns import SharedAnswers
from tests.trace.trace_files import document, events, write

ASKED: list[str] = []


def ask(predicate, *names: str, answers: SharedAnswers | None = None) -> list[bool]:
    answers = answers or SharedAnswers()
    return answers.of(predicate, names, answers.numbers(names)).tolist()


def test_a_predicate_is_asked_once_for_each_name():
    def predicate(name: str) -> bool:
        ASKED.append(name)
        return name.startswith("a")

    answers = SharedAnswers()
    for _ in range(3):
        assert ask(predicate, "ab", "b", answers=answers) == [True, False]
    assert ask(predicate, "b", "c", "ab", answers=answers) == [False, False, True]
    assert ASKED == ["ab", "b", "c"]


def test_names_beyond_the_limit_are_asked_each_time():
    answers = SharedAnswers(most=2)
    assert ask(str.isupper, "a", "c", answers=answers) == [False, False]
    for _ in range(2):
        assert ask(lambda name: name > "b", "a", "c", "d", "b", answers=answers) == [False, True, True, False]
    assert answers.numbers(("a", "c", "d", "b")).tolist() == [0, 1, -1, -1]


def test_more_names_than_there_were_at_first_are_answered():
    answers = SharedAnswers()
    for count in (1, 2000, 5000):
        names = [str(number) for number in range(count)]
        assert ask(lambda name: name[-1] == "7", *names, answers=answers) == [
            name[-1] == "7" for name in names
        ]


def test_a_predicate_that_holds_something_is_never_mixed_up_with_its_like():
    def starting_with(letter: str):
        return lambda name: name.startswith(letter)

    def with_default(letter: str):
        return lambda name, own=letter: name.startswith(own)

    for make in (starting_with, with_default):
        answers = SharedAnswers()
        assert ask(make("a"), "ab", answers=answers) == [True]
        assert ask(make("b"), "ab", answers=answers) == [False]


def test_lambdas_of_one_line_are_told_apart():
    first, second, answers = (lambda name: "x" in name), (lambda name: "y" in name), SharedAnswers()
    assert (ask(first, "x", answers=answers), ask(second, "x", answers=answers)) == ([True], [False])


def test_other_callables_are_called_as_they_are():
    assert ask("abc".startswith, "a", "b") == [True, False]
    assert ask(classify.step_number, "ProfilerStep#3", "step") == [True, False]


def test_ranks_share_texts_and_descriptions(tmp_path):
    groups = [{"pg_name": "0", "ranks": [0, 1], "pg_size": 2}]
    files = []
    for rank in (0, 1):
        job = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups}
        content = document(events(20), distributedInfo=job, deviceProperties=[{"id": rank, "name": "H100"}])
        files.append(write(tmp_path / f"rank{rank}.json", content))
    first, second = load_traces(files).traces
    assert first.meta.process_groups is second.meta.process_groups
    assert first.meta.devices != second.meta.devices
    assert {id(name) for name in first.names} == {id(name) for name in second.names}
    for together, file in zip((first, second), files, strict=True):
        alone = load_trace(file)
        assert (together.meta, together.names) == (alone.meta, alone.names)
        assert np.array_equal(together.name, alone.name)
