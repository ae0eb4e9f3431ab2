"""Samples are placed in steps and events all at once, as one would place each by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.places import Where
from ddpdoctor.measure.sourcelines import Frame
from ddpdoctor.measure.sourcelines.holding import Holders
from ddpdoctor.measure.sourcelines.samples import Samples, counted
from ddpdoctor.measure.sourcelines.taken import EVENTS, Taken
from ddpdoctor.measure.steplog import Event, RankLog, Step
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind, RankRecord

STEP_NS, AFTER_COLLECTION_NS = 100_000_000, 2_000_000
KINDS = [*EventKind]
INSIDE = {
    *(kind for kinds in EVENTS.values() for kind in kinds),
    EventKind.COLLECTIVE,
    EventKind.BARRIER,
    EventKind.WAIT,
    EventKind.LOAD,
}
ASKED = [
    [Component.HOST],
    [Component.FORWARD],
    [Component.DATA, Component.EPOCH_START],
    [Component.COLLECTION],
    [Component.BACKWARD, Component.HOST],
]


def log_of(seed: int, samples: int = 400) -> RankLog:
    """Steps with gaps between them, events that overlap and leave their step, samples in all of it."""
    drawn = random.Random(seed)
    steps = tuple(
        Step(
            number,
            start := number * 2 * STEP_NS + 10**12,
            start + STEP_NS,
            tuple(
                Event(kind.value, drawn.randrange(-STEP_NS // 4, STEP_NS), drawn.randrange(STEP_NS // 3))
                for kind in drawn.choices(KINDS, k=drawn.randrange(8))
            ),
            (),
            None,
            None,
        )
        for number in range(20)
    )
    times = sorted(drawn.randrange(10**12 - STEP_NS, 10**12 + 41 * STEP_NS) for _ in range(samples))
    rows = [(at, 1, 1, drawn.choice((0, 0, 1_500_000, 7_000_000))) for at in times]
    return RankLog(0, RankRecord("", 0, {}), steps, samples=np.array(rows, np.int64).reshape(-1, 4))


def one_by_one(log: RankLog, components: list[Component]) -> list[int]:
    """When those were taken that are of this kind of work."""
    found = []
    for taken_ns, _, _, held_ns in log.samples.tolist():
        step = next((step for step in log.steps if step.start_ns <= taken_ns < step.end_ns), None)
        if step is None:
            continue
        moment = taken_ns - (held_ns if 1_000_000 <= held_ns < 5_000_000 else 0) - step.start_ns
        covering = {
            event.kind
            for event in step.events
            if event.start_ns
            <= moment
            < event.end_ns + (AFTER_COLLECTION_NS if event.kind == EventKind.COLLECTION else 0)
        }
        inside = covering & {kind.value for kind in INSIDE}
        wanted = {kind.value for component in components for kind in EVENTS.get(component, ())}
        in_forward = any(
            event.kind == EventKind.FORWARD and event.start_ns <= moment < event.end_ns
            for event in step.events
        )
        else_wanted = Component.FORWARD in components if in_forward else Component.HOST in components
        if inside & wanted if inside else else_wanted:
            found.append(taken_ns)
    return found


@pytest.mark.parametrize("components", ASKED, ids=lambda asked: "+".join(asked))
@pytest.mark.parametrize("at_once", [1 << 20, 7])
def test_each_sample_is_of_the_work_in_which_it_was_taken(monkeypatch, components, at_once):
    monkeypatch.setattr("ddpdoctor.measure.sourcelines.taken._PAIRS_AT_ONCE", at_once)
    counts = 0
    for seed in range(5):
        log = log_of(seed)
        taken = Taken(log, log.samples, Holders([log]))
        expected = one_by_one(log, components)
        assert taken.taken_ns[taken.while_doing(components)].tolist() == expected
        counts += len(expected)
    assert counts > 10


def test_a_log_without_steps_or_samples():
    for log in (log_of(1, samples=0), RankLog(0, RankRecord("", 0, {}), samples=log_of(1).samples)):
        taken = Taken(log, log.samples, Holders([log]))
        assert len(taken) == 0 and not taken.while_doing([Component.HOST]).any() and taken.places == []


def test_lines_of_two_numbers_that_show_the_same_are_counted_together():
    """Frames of torch's are not told apart, and a log may number a line twice."""
    log = log_of(1)
    where = {1: Where("train.py", 8, "main"), 2: Where("/site-packages/torch/a.py", 1, "f")}
    where |= {3: Where("/site-packages/torch/b.py", 2, "g"), 4: Where("train.py", 8, "main")}
    samples = log.samples.copy()
    samples[:, 1:3] = np.array([[1, 2], [1, 3], [4, 2], [4, 3]])[np.arange(len(samples)) % 4]
    log = replace(log, samples=samples, sample_where=where)
    ranks = [(log, Samples(log, holders := Holders([log])))]
    found = counted(ranks, [Component.HOST], set(range(20)), {0: {}}, holders)
    assert found.at == {Frame("train.py", 8, "main"): found.samples} and found.samples > 20
