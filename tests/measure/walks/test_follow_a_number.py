"""The walk "Follow a number back to its events" of docs/architecture.md."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ddpdoctor.analysis import Options, conclude, prepare
from ddpdoctor.measure.flow import measure
from ddpdoctor.rundir.stepevents import EventField, EventKind, LineField

RUN = Path(__file__).parents[3] / "fixtures" / "slow-data-one-rank"


def data_wait_ns(rank: int) -> dict[int, int]:
    """Step → ns in ``next()`` of the loader, added up from the lines of the file itself."""
    waits = {}
    for text in (RUN / "ranks" / f"{rank:05}" / "steps.jsonl").read_text().splitlines():
        line = json.loads(text)
        if LineField.STEP.value in line:
            waits[line[LineField.STEP.value]] = sum(
                event[EventField.DURATION_NS.value]
                for event in line.get(LineField.EVENTS.value, [])
                if event[EventField.KIND.value] == EventKind.DATA.value
            )
    return waits


def test_a_stragglers_wait_for_data_is_the_sum_of_its_events():
    options = Options(cache=False, jobs=1)
    prepared = prepare([str(RUN)], options)
    diagnosis = conclude(prepared, options)
    cost = diagnosis.facts["late"]["data"]
    finding = diagnosis.findings[0]
    assert finding.rule == "dataloader/one-rank-late" and finding.ranks == cost["ranks"] == [1]

    graph = measure(prepared.logs, prepared.windows, prepared.inputs.telemetry).graphs.primary
    measured = [step for group in graph.groups for step in group.steps.tolist()]
    assert len(measured) == diagnosis.steps.measured == cost["steps_seen"]
    waits = data_wait_ns(rank=1)
    assert cost["own_ms"] == pytest.approx(np.mean([waits[step] for step in measured]) / 1e6, rel=1e-6)
