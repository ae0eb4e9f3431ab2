"""Who called the line that a finding names."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.sourcelines import WindowSourceLines, with_heaviest
from ddpdoctor.measure.window import read_window
from ddpdoctor.trace import load_trace
from tests.measure.recorded import Job, late_facts, measured, plant, record
from tests.measure.steplogs import log_of, span_of, write_lines
from tests.trace.trace_files import document, event, write

PLACES = 10
HELPER, MAIN = "/home/alice/metrics.py", "/home/alice/trainer.py"


def called_from(place):
    return CodeLine(MAIN, 100 + place, f"Trainer.log_{place}")


def write_samples(folder, rank, weights):
    """A sample each 0.3 ms of the run, at the same line of a helper; of every so many, ``weights`` by calling place."""
    lines = [{"where": 0, "file": MAIN, "line": 300, "function": "Trainer.fit"}]
    for place in range(PLACES):
        caller = called_from(place)
        above = {"file": caller.file, "line": caller.line, "function": caller.function, "by": 0}
        lines.append({"where": 1 + place, **above})
        helper = {"file": HELPER, "line": 18, "function": "to_numpy", "by": 1 + place}
        lines.append({"where": 100 + place, **helper})
    turns = [place for place, weight in enumerate(weights) for _ in range(weight)]
    for number, moment in enumerate(range(*span_of(folder, rank), 300_000)):
        place = 100 + turns[number % len(turns)]
        lines.append({"t": moment, "s": [[0, place, place]]})
    write_lines(log_of(folder, rank, "samples.jsonl"), lines)


def test_of_ten_places_that_call_a_helper_the_slow_one_is_named(tmp_path):
    folder = record(tmp_path / "run", Job(host=4.0, extra=plant(1, host=8.0)))
    for rank in range(4):
        write_samples(folder, rank, [24 if rank == 1 and place == 4 else 1 for place in range(PLACES)])
    found, _ = measured(folder)
    (where,) = late_facts(found)["host"].where
    assert (where.file, where.line) == (HELPER, 18)
    assert (where.callers, where.more_callers) == ((called_from(4),), 0)
    # Of the others' 4 ms of host work a tenth is called from there, of the 12 ms of rank 1 24 of 33 samples.
    assert where.others_share == pytest.approx(4.0 / 10 / (12.0 * 24 / 33), rel=0.2)


def test_a_helper_that_two_places_call_alike_says_that_there_is_another(tmp_path):
    folder = record(tmp_path / "run", Job(host=4.0, extra=plant(1, host=8.0)))
    for rank in range(4):
        own = {2: 30, 7: 20} if rank == 1 else {}
        write_samples(folder, rank, [own.get(place, 1) for place in range(PLACES)])
    found, _ = measured(folder)
    (where,) = late_facts(found)["host"].where
    assert (where.callers, where.more_callers) == ((called_from(2),), 1)


TRAIN_STEP = "the step"
"""Stands for the function that calls the backward pass in the recorded job."""


@pytest.mark.parametrize(
    ("paths", "edited"),
    [
        ([[(18, TRAIN_STEP), (25, "fit"), (60, "fit")]], 18),
        ([[(18, TRAIN_STEP)]], 18),
        ([[(150, "helper"), (40, TRAIN_STEP), (60, "fit")]], 40),
        ([[(61, "fit"), (5, "main")], [(18, TRAIN_STEP), (60, "fit"), (5, "main")]], 61),
    ],
    ids=["in the step", "in the loop itself", "called by the step", "called beside the step"],
)
def test_the_call_of_a_whole_step_is_no_line_to_edit(tmp_path, paths, edited):
    """The step is a function that the loop calls, as a trainer's is: its backward pass and optimizer are called there."""
    folder = record(tmp_path / "run", Job(host=4.0, extra=plant(1, host=8.0)))
    for rank in range(4):
        log = log_of(folder, rank, "steps.jsonl")
        (step,) = (each for each in map(json.loads, log.read_text().splitlines()) if each.get("where") == 2)
        lines = []
        for path, frames in enumerate(paths):
            for depth, (line, function) in reversed(list(enumerate(frames))):
                place = {"line": line, "function": step["function"] if function is TRAIN_STEP else function}
                caller = {"by": 91 + 10 * path + depth} if depth + 1 < len(frames) else {}
                lines.append({"where": 90 + 10 * path + depth, "file": step["file"], **place, **caller})
        for number, moment in enumerate(range(*span_of(folder, rank), 300_000 if rank == 1 else 3_000_000)):
            place = 100 if len(paths) > 1 and number % 20 == 0 else 90
            lines.append({"t": moment, "s": [[0, place, place]]})
        write_lines(log_of(folder, rank, "samples.jsonl"), lines)
    found, _ = measured(folder)
    (where, *_) = late_facts(found)["host"].where
    assert (where.line, where.call.line) == (paths[0][0][0], edited)


def test_frames_of_a_profile_have_callers(tmp_path):
    def frame(name, ts, dur):
        return event(name, ts, dur, "python_function")

    content = [
        event("ProfilerStep#3", 0, 50_000, "user_annotation"),
        frame("work/train.py(200): main", 0, 50_000),
        frame("some/site-packages/lib/loop.py(5): loop", 5_000, 40_000),
        frame("work/trainer.py(133): log", 10_000, 25_000),
        frame("work/metrics.py(18): to_numpy", 12_000, 20_000),
        event("aten::mm", 12_500, 15_000, "cpu_op"),
    ]
    window = read_window(load_trace(write(tmp_path / "rank0.json", document(content))))
    lines = WindowSourceLines([window])
    (first, *_) = lines.work(["forward"], None, None)
    assert (first.line, first.callers) == (18, (CodeLine("work/trainer.py", 133, "log"),))


LAYER = CodeLine("/home/alice/model.py", 52, "Dense.forward")
STEP = CodeLine(MAIN, 160, "one_step")
EXTRA = CodeLine(MAIN, 171, "one_step")
FIT = CodeLine(MAIN, 300, "Trainer.fit")


def place_of(line):
    return Where(line.file, line.line, line.function, share=1.0)


def test_a_line_that_all_ranks_run_stands_behind_the_call_that_only_the_late_rank_makes():
    usual, extra = {(LAYER, STEP, FIT): 40.0}, {(LAYER, EXTRA, FIT): 30.0}
    places = [place_of(LAYER)]
    found = with_heaviest(
        places, usual | extra, {stack: 3 * weight for stack, weight in usual.items()}, 1 / 3
    )
    assert [where.stack for where in found] == [(EXTRA, FIT), (LAYER, EXTRA)]


def test_a_line_that_only_the_late_rank_runs_stands_first():
    own, of_others = {(called_from(1), EXTRA, FIT): 30.0}, {(LAYER, STEP, FIT): 90.0}
    (found,) = with_heaviest([place_of(called_from(1))], own, of_others, 1 / 3)
    assert found.stack[0] == called_from(1)


def test_a_line_that_is_slower_on_the_way_of_all_ranks_stands_first():
    (found,) = with_heaviest(
        [place_of(LAYER)], {(LAYER, STEP, FIT): 70.0}, {(LAYER, STEP, FIT): 120.0}, 1 / 3
    )
    assert found.stack[0] == LAYER


def frames(*names):
    """The innermost nine, as the hook records them, of these functions; a name may have its line behind it."""
    parts = [name.partition(":") for name in names]
    return tuple(CodeLine("/home/alice/model.py", int(line or 7), name) for name, _, line in parts)[:9]


DEEP = ["block", "layers", "encoder", "model", "step", "loop", "epoch", "main"]


@pytest.mark.parametrize(
    ("own", "usual"),
    [
        (["work", "extra", "attend:59", *DEEP], ["work", "attend:58", *DEEP]),
        (["work", "attend:59", *DEEP], ["work", "usual", "norm", "attend:58", *DEEP]),
        (["work", "attend:59", *DEEP], ["work", "attend:58", *DEEP]),
    ],
    ids=["the late rank's path is longer", "the others' path is longer", "both are as long"],
)
def test_calls_further_out_than_is_recorded_are_not_taken_for_the_late_ranks_own(own, usual):
    own, usual = frames(*own), frames(*usual)
    found = with_heaviest([place_of(own[0])], {own: 100.0}, {usual: 60.0}, 1.0)
    assert [where.stack[0] for where in found] == [*frames("attend:59"), own[0]]


def test_where_nothing_common_is_recorded_no_call_is_the_one_that_differs():
    own, usual = frames("work", "attend:59", *DEEP), frames("work", *(f"deep_{n}" for n in range(9)))
    (found,) = with_heaviest([place_of(own[0])], {own: 100.0}, {usual: 60.0}, 1.0)
    assert found.stack[0] == own[0]


LOOP = CodeLine("/env/lib/python3.11/site-packages/lightning/pytorch/trainer/trainer.py", 584, "Trainer.fit")
HOOK = CodeLine(MAIN, 41, "Dump.on_train_batch_end")


@pytest.mark.parametrize(
    ("hooks", "named"), [(True, [(HOOK, LOOP), (LAYER, HOOK, LOOP)]), (False, [(LAYER, HOOK, LOOP)])]
)
def test_the_hook_that_a_framework_calls_stands_first(hooks, named):
    found = with_heaviest([place_of(LAYER)], {(LAYER, HOOK, LOOP, FIT): 40.0}, hooks=hooks)
    assert [where.stack for where in found] == named
    assert all((where.call.line, where.call.function) == (HOOK.line, HOOK.function) for where in found)


def test_without_a_framework_the_outermost_caller_is_in_the_loop():
    (found,) = with_heaviest([place_of(LAYER)], {(LAYER, STEP, FIT): 40.0, (LAYER, STEP): 1.0})
    assert found.call == FIT


TRAINER = "/env/lib/python3.11/site-packages/transformers/trainer.py"
EVALUATE, TRAIN = CodeLine(TRAINER, 2600, "Trainer.evaluate"), CodeLine(TRAINER, 1576, "Trainer.train")


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ((LAYER, EVALUATE, HOOK, TRAIN, FIT), HOOK),
        ((LAYER, EVALUATE, TRAIN, FIT), LAYER),
        ((LAYER, STEP, FIT), FIT),
        ((TRAIN, EVALUATE), EVALUATE),
    ],
    ids=["a hook evaluates", "the framework evaluates", "no framework", "no line of the user's"],
)
def test_the_line_in_the_training_loop(way, call):
    where = Where(way[0].file, way[0].line, way[0].function, callers=way[1:])
    assert where.call.function == call.function
