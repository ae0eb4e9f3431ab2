"""The numbers of lines, by who called them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

from ddpdoctor import demo, rundir
from ddpdoctor.hook import guard
from ddpdoctor.hook.job import CodeKinds, Lines


def code(file, name):
    names: dict[str, object] = {}
    exec(compile(f"def {name}(): pass", file, "exec"), names)
    return names[name].__code__


MAIN = code("/home/alice/train.py", "main")
LOG = code("/home/alice/trainer.py", "log")
VALUES = code("/home/alice/metrics.py", "values")
TORCH = code("/venv/lib/python3.11/site-packages/torch/nn/module.py", "forward")
LIBRARY = code("/venv/lib/python3.11/site-packages/some_trainer/loop.py", "loop")


def defined():
    documents: list[str] = []
    return Lines(CodeKinds(), documents.append), documents


def test_the_code_that_records_is_hidden_and_the_demo_is_not():
    stack = [(code(module.__file__, "write"), module) for module in (guard, rundir, demo)]
    assert CodeKinds().innermost(stack) is demo


def way(documents, number):
    """Lines from the innermost one outwards."""
    known = {document["where"]: document for document in map(json.loads, documents)}
    lines = []
    while number is not None:
        lines.append((os.path.basename(known[number]["file"]), known[number]["line"]))
        number = known[number].get("by")
    return lines


def test_a_line_that_is_called_from_two_places_has_two_numbers():
    lines, documents = defined()
    first = lines.of_stack([(VALUES, 18), (LOG, 133), (MAIN, 200)])
    second = lines.of_stack([(VALUES, 18), (LOG, 140), (MAIN, 200)])
    assert first != second and lines.of_stack([(VALUES, 18), (LOG, 133), (MAIN, 200)]) == first
    assert way(documents, first) == [("metrics.py", 18), ("trainer.py", 133), ("train.py", 200)]
    assert way(documents, second) == [("metrics.py", 18), ("trainer.py", 140), ("train.py", 200)]


def test_frames_of_libraries_between_the_users_are_left_out():
    lines, documents = defined()
    number = lines.of_stack([(TORCH, 3), (VALUES, 18), (LIBRARY, 5), (LOG, 133), (TORCH, 9), (MAIN, 200)])
    assert way(documents, number) == [("metrics.py", 18), ("trainer.py", 133), ("train.py", 200)]


def test_a_deep_recursion_keeps_the_last_calls_only():
    lines, documents = defined()
    number = lines.of_stack([(VALUES, 18)] * 150 + [(MAIN, 200)])
    assert set(way(documents, number)) == {("metrics.py", 18)} and len(documents) < 20


def test_a_line_without_a_caller_is_the_one_that_the_step_log_names():
    lines, documents = defined()
    assert lines.of_stack([(MAIN, 200)]) == lines.id_of(MAIN, 200) and len(documents) == 1


def calling(*files):
    """Asks for the caller twice, from functions in these files that call each other, the innermost first."""
    lines, documents = defined()
    call = lambda: lines.caller(through=True)  # noqa: E731
    for file in (*files, "<nobody's>"):
        names = {"call": call}
        exec(compile("def calling():\n    return call()\n", file, "exec"), names)
        call = names["calling"]
    with ThreadPoolExecutor(1) as pool:  # a stack of its own
        answers = [pool.submit(call).result() for _ in range(2)]
    assert answers[0] == answers[1]
    return [json.loads(document) for document in documents]


def test_lines_of_a_framework_between_the_user_and_torch_are_written():
    packages = "/env/lib/python3.11/site-packages"
    loop, fit, torch = (f"{packages}/{name}.py" for name in ("lightning/loop", "lightning/fit", "torch/x"))
    (own,) = calling(torch, loop, torch, fit, "/home/me/train.py")
    assert own["file"] == "/home/me/train.py"
    assert [file for file, _, _ in own["through"]] == [loop, fit]
    (own,) = calling(torch, "/home/me/train.py", fit)
    assert "through" not in own
    (own,) = calling(torch, loop, f"{packages}/some_trainer/loop.py")
    assert own["file"].endswith("some_trainer/loop.py") and [file for file, _, _ in own["through"]] == [loop]
    (own,) = calling(torch, f"{packages}/my_model/model.py", loop, fit, "/home/me/train.py")
    assert own["file"] == "/home/me/train.py" and "through" not in own
    (own,) = calling(torch, loop, fit)
    assert own["file"] == loop and [file for file, _, _ in own["through"]] == [loop, fit]


def test_a_line_has_a_number_for_each_way_through_a_framework():
    lines, documents = defined()
    ways = [[(LIBRARY, 5)], [(LIBRARY, 6)], []]
    numbers = [lines.id_of(MAIN, 200, through=way) for way in ways]
    assert len(set(numbers)) == 3 and numbers == [lines.id_of(MAIN, 200, through=way) for way in ways]
    assert len(documents) == 3


def test_the_loop_of_a_framework_that_calls_the_user_s_hook_is_among_the_callers():
    lines, documents = defined()
    packages = "/env/lib/python3.11/site-packages/lightning/pytorch"
    fit, inside = (code(f"{packages}/trainer.py", name) for name in ("fit", "run_stage"))
    number = lines.of_stack([(TORCH, 3), (VALUES, 18), (inside, 5), (fit, 9), (TORCH, 9), (MAIN, 200)])
    assert way(documents, number) == [("metrics.py", 18), ("trainer.py", 9), ("train.py", 200)]
    assert way(documents, lines.of_stack([(TORCH, 3), (fit, 9), (MAIN, 201)])) == [("train.py", 201)]
