"""What ranks have in common is asked once and kept once, and is the same as if it were not."""

from __future__ import annotations

import numpy as np

from ddpdoctor.trace import classify, load_trace, load_traces
from ddpdoctor.trace.columns import memoized
from tests.trace.trace_files import document, events, write

ASKED: list[str] = []


def test_a_predicate_is_asked_once_for_each_name():
    def predicate(name: str) -> bool:
        ASKED.append(name)
        return name.startswith("a")

    for _ in range(3):
        answer = memoized(predicate)
        assert [answer(name) for name in ("ab", "b", "ab")] == [True, False, True]
    assert ASKED == ["ab", "b"]


def test_a_predicate_that_holds_something_is_never_mixed_up_with_its_like():
    def starting_with(letter: str):
        return lambda name: name.startswith(letter)

    def with_default(letter: str):
        return lambda name, own=letter: name.startswith(own)

    for make in (starting_with, with_default):
        a, b = memoized(make("a")), memoized(make("b"))
        assert (a("ab"), b("ab")) == (True, False)


def test_lambdas_of_one_line_are_told_apart():
    first, second = (lambda name: "x" in name), (lambda name: "y" in name)
    assert (memoized(first)("x"), memoized(second)("x")) == (True, False)


def test_other_callables_are_called_as_they_are():
    assert memoized(classify.step_number) is classify.step_number
    assert memoized("abc".startswith)("a") is True


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
