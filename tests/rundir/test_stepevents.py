"""The step log's schema, the files that were recorded, and the documentation say the same."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.measure.steplog.records import Event, LogRecord, Reduction
from ddpdoctor.rundir.stepevents import EventField, EventKind, LineField, Mark
from tests.rundir.stepfields import COMMON_FIELDS, FIELDS_OF

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "formats.md").read_text()
LOGS = sorted((ROOT / "fixtures").rglob("steps.jsonl"))

NO_LONGER_WRITTEN = {"csw", "it", "seq"}
"""Context switches, and the numbers of iterations and collectives: the oldest fixtures have them."""


def chapter(title: str) -> str:
    return DOCUMENT.split(f"\n## {title}")[1].split("\n## ")[0]


STEPS = chapter("`steps.jsonl`")


def test_every_mark_and_every_field_of_a_line_is_documented():
    assert [mark for mark in Mark if f"`{mark}`" not in STEPS] == []
    assert [field for field in LineField if f'"{field}":' not in STEPS + chapter("`samples.jsonl`")] == []


def test_the_documented_events_are_those_of_the_schema():
    rows = [line.split("|") for line in STEPS.splitlines() if line.startswith("| `")]
    documented = {kind: row[3] for row in rows for kind in re.findall("`(\\w+)`", row[1])}
    documented.pop("k")
    assert set(documented) == {str(kind) for kind in EventKind}
    assert set(FIELDS_OF) == set(EventKind)
    for kind, fields in FIELDS_OF.items():
        said = documented[kind] if documented[kind].strip() != "as `coll`" else documented["coll"]
        assert [field for field in fields if f"`{field}`" not in said] == [], kind
    assert [field for field in COMMON_FIELDS if f"`{field}`" not in STEPS] == []


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.relative_to(ROOT / "fixtures").as_posix())
def test_what_was_recorded_is_in_the_schema(log):
    for text in log.read_text().splitlines():
        line = json.loads(text)
        assert set(line) - NO_LONGER_WRITTEN <= set(LineField)
        for event in line.get(LineField.EVENTS, []):
            assert set(event) - NO_LONGER_WRITTEN <= {*COMMON_FIELDS, *FIELDS_OF[EventKind(event["k"])]}, (
                event
            )
            further = {EventField.MODULE, EventField.SYNCED, EventField.FORWARD_END_NS, EventField.READY_NS}
            assert all(set(module) <= further for module in event.get(EventField.ALSO, []))


def test_there_are_recorded_logs():
    assert LOGS


@pytest.mark.parametrize(
    ("read", "schema"), [(Event, EventField), (Reduction, EventField), (LogRecord, LineField)]
)
def test_the_reader_has_the_names_of_the_schema(read: type[msgspec.Struct], schema: type[Enum]):
    names = {field.name.lower(): field.value for field in schema}
    assert {
        field.name: field.encode_name
        for field in msgspec.structs.fields(read)
        if names.get(field.name) != field.encode_name
    } == {}


def test_a_word_of_the_schema_is_itself_in_a_text():
    assert json.dumps({EventField.KIND: EventKind.FORWARD}) == '{"k": "fwd"}'
    assert EventField.READY_NS.key == '"ready":'
