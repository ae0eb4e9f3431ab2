"""Each component, each cause and each kind of event is in every table that decides what it counts as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.measure import costs
from ddpdoctor.measure.sourcelines.table import kinds_of
from ddpdoctor.measure.steplog import Event, Step
from ddpdoctor.measure.steplog.log import activities_of
from ddpdoctor.measure.taxonomy import (
    COMPONENTS,
    LATE_COMPONENTS,
    NO_WORK,
    SHARED_COMPONENTS,
    SHARED_SYNCS,
    SHARED_TRANSFERS,
    Component,
    LateCause,
    SharedCause,
)
from ddpdoctor.measure.wholerun.events import KINDS
from ddpdoctor.rundir.stepevents import EventKind

MS = 1_000_000
READ_AS: dict[EventKind, Component | None] = {
    EventKind.DATA: Component.DATA,
    EventKind.ITERATION: Component.EPOCH_START,
    EventKind.FORWARD: Component.FORWARD,
    EventKind.BROADCAST: None,
    EventKind.EVALUATION: Component.FORWARD,
    EventKind.BACKWARD: Component.BACKWARD,
    EventKind.OPTIMIZER: Component.OPTIMIZER,
    EventKind.COLLECTIVE: None,
    EventKind.BARRIER: None,
    EventKind.WAIT: None,
    EventKind.COLLECTION: Component.COLLECTION,
    EventKind.SAVE: Component.CHECKPOINT,
    EventKind.LOAD: None,
    EventKind.MORE: None,
}
"""Kind of event → the component that its time counts as; None: synchronisations, and what is no work of a step."""
NO_SHARED_CAUSE = {
    Component.FORWARD: "what a step is for",
    Component.BACKWARD: "what a step is for",
    Component.LOSS: "what a step is for",
    Component.DEVICE_SYNC: "a synchronisation",
    Component.UNMATCHED: "no known work",
    Component.UNSEEN: "no known work",
}
NO_OWN_WORK = (
    EventKind.BROADCAST,
    EventKind.COLLECTIVE,
    EventKind.BARRIER,
    EventKind.WAIT,
    EventKind.EVALUATION,
    EventKind.COLLECTION,
    EventKind.MORE,
)
"""Kinds of events that the account of a run counts as no work of the rank: it may wait in them, they are within others, or
they are measured elsewhere."""


def read_as(kind: EventKind, on_device_time: bool) -> Component | None:
    """The component of a step's only event of this kind."""
    step = Step(0, 0, 100 * MS, (Event(kind.value, 10 * MS, 20 * MS),), (), None, None)
    sets = activities_of([step], 0, (), on_device_time).sets
    found = [component for component, (starts, ends) in sets.items() if (ends - starts).sum() > 0]
    return Component(found[0]) if found else None


@pytest.mark.parametrize("on_device_time", [False, True])
def test_each_kind_of_event_is_read(on_device_time: bool) -> None:
    assert {kind: read_as(kind, on_device_time) for kind in EventKind} == READ_AS


def test_samples_in_an_event_belong_to_its_component() -> None:
    elsewhere = (None, Component.FORWARD)
    """A forward pass has a bit of its own."""
    missing = {
        kind: component
        for kind, component in READ_AS.items()
        if component not in elsewhere and kind not in kinds_of([component] if component else [])
    }
    assert not missing


def test_the_account_of_a_run_knows_each_kind_of_event() -> None:
    assert Counter([*KINDS, *NO_OWN_WORK]) == dict.fromkeys(EventKind, 1)


def test_each_component_has_one_late_cause() -> None:
    assert Counter(each for own in LATE_COMPONENTS.values() for each in own) == dict.fromkeys(COMPONENTS, 1)
    assert LATE_COMPONENTS[LateCause.UNKNOWN] == NO_WORK


def test_each_component_is_of_a_shared_cause_or_says_why_not() -> None:
    shared = {each for own in SHARED_COMPONENTS.values() for each in own}
    assert shared | NO_SHARED_CAUSE.keys() == set(COMPONENTS) and not shared & NO_SHARED_CAUSE.keys()


@pytest.mark.parametrize(
    ("causes", "tables"),
    [
        (LateCause, (LATE_COMPONENTS,)),
        (SharedCause, (SHARED_COMPONENTS, SHARED_SYNCS, SHARED_TRANSFERS)),
    ],
)
def test_each_cause_has_components_or_a_pricer(
    causes: type[LateCause] | type[SharedCause], tables: Sequence[Mapping[Any, object]]
) -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in Path(costs.__file__).parent.glob("*.py"))
    unlisted = [cause for cause in causes if not any(cause in table for table in tables)]
    assert [cause for cause in unlisted if f"{causes.__name__}.{cause.name}" not in text] == []


def test_the_names_in_the_exported_table_of_events_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("| `name` | string | `data`")]
    never = (*NO_WORK, Component.HOST)
    assert [each for each in COMPONENTS if each not in never and f"`{each}`" not in line] == []
