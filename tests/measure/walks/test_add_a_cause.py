"""The walk "Add a cause" of docs/architecture.md in copies of the package: by taxonomy, pricer and rule; and as a new kind of work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.measure.recorded import Job, record

ROOT = Path(__file__).parents[3]

MEMBER = '''
    LOGGING = "logging"
    """Writing a log in each step."""
'''
PRICER = '''"""Writing a log in each step."""

from ddpdoctor.measure.attribution import component
from ddpdoctor.measure.replay import without_work
from ddpdoctor.measure.taxonomy import Component

from .price import Context, Costs


def logging_cost(context: Context) -> Costs:
    """``shared.logging``: for the sake of the example, a quarter of the backward pass."""
    backward = component([group.work for group in context.graph.groups], [Component.BACKWARD])
    written = [0.25 * work for work in backward]
    return {"shared.logging": context.cost([without_work(written)], written, (Component.BACKWARD,))}
'''
RULE = """\
id: host/logging
title: A log is written in each step
question: Does the job write a log in each step?
costs: shared.logging
headline: Writing a log takes {{ cost.ms_per_step|ms }} of every {{ steps.mean_ms|ms }} step
explain: Without it a step takes {{ after_ms|ms }}.
evidence:
  - {fact: cost.ms_per_step, means: Step time that a replay without it saves}
fixes:
  - title: Write it every hundred steps
    why: Nobody reads it as often.
    docs: [https://docs.python.org/3/library/logging.html]
thresholds: {}
limits: An example.
tests:
  - name: 5 of 50 ms
    facts: {steps: {mean_ms: 50.0}, shared: {logging: {ms_per_step: 5.0}}}
    fires: true
    severity: warning
    says: [Writing a log takes]
  - name: none
    facts: {steps: {mean_ms: 50.0}}
    fires: false
"""


WORK = {
    "ddpdoctor/measure/taxonomy.py": (
        ('    DEVICE_SYNC = "device_sync"\n    """The device idles because', '    LOGGING = "logging"\n'),
        ("\n\n\nclass SharedCause(StrEnum)", MEMBER.rstrip()),
        ("\n\nComponents = tuple[Component, ...]", MEMBER),
        ("    Component.DEVICE_SYNC: Part.HOST,\n", "    Component.LOGGING: Part.HOST,\n"),
        ("    LateCause.UNKNOWN: NO_WORK,\n", "    LateCause.LOGGING: (Component.LOGGING,),\n"),
        (
            "    SharedCause.LAUNCH: (Component.LAUNCH,),\n",
            "    SharedCause.LOGGING: (Component.LOGGING,),\n",
        ),
    ),
    "ddpdoctor/measure/steplog/log.py": (
        ("Component.EPOCH_START, Component.DATA)\n_ON_DEVICE", "Component.LOGGING, "),
        ("    EventKind.EVALUATION: Component.FORWARD,\n", "    EventKind.LOGGING: Component.LOGGING,\n"),
    ),
    "ddpdoctor/measure/sourcelines/table.py": (
        ("    Component.CHECKPOINT: (EventKind.SAVE,),\n", "    Component.LOGGING: (EventKind.LOGGING,),\n"),
    ),
    "ddpdoctor/measure/wholerun/events.py": (
        ('    EventKind.OPTIMIZER: "compute",\n', '    EventKind.LOGGING: "host",\n'),
    ),
    "ddpdoctor/rundir/stepevents.py": (('    MORE = "more"\n', '    LOGGING = "log"\n'),),
}
"""By file: texts, and what is put in front of each."""


def edit(file: Path, before: str, added: str) -> None:
    """Put a text in front of the one place where ``before`` stands."""
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, added + before))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for folder in ("ddpdoctor", "rules"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(package: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "XDG_CACHE_HOME": str(package / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def diagnosed(package: Path, job: Path) -> dict[str, Any]:
    run(package, "-m", "ddpdoctor", "analyze", str(job), "--json", "found.json", "--no-cache")
    found: dict[str, Any] = json.loads((package / "found.json").read_text())
    return found


def test_a_cause_is_a_member_a_pricer_and_a_rule(package: Path) -> None:
    measure = package / "ddpdoctor" / "measure"
    edit(measure / "taxonomy.py", "\n\nComponents = tuple[Component, ...]", MEMBER)
    (measure / "costs" / "logcost.py").write_text(PRICER)
    edit(measure / "costs" / "merging.py", "from .price import", "from .logcost import logging_cost\n")
    edit(
        measure / "costs" / "merging.py",
        "    starved_of_cpu,\n    transfer_costs,\n)\n",
        "    logging_cost,\n",
    )
    (package / "rules" / "host" / "logging.yaml").write_text(RULE)

    diagnosis = diagnosed(package, ROOT / "fixtures" / "healthy")
    (finding,) = [finding for finding in diagnosis["findings"] if finding["rule"] == "host/logging"]
    cost = diagnosis["facts"]["shared"]["logging"]
    assert finding["costs_ms_per_step"] == pytest.approx(cost["ms_per_step"]) and cost["ms_per_step"] > 0
    code = "from ddpdoctor.diagnose.facts_view import doc_of; print(doc_of('shared.logging'))"
    assert run(package, "-c", code).strip() == "Writing a log in each step."


def test_a_kind_of_work_has_its_costs_without_a_pricer(package: Path) -> None:
    """``save`` events stand for those that a patch would record."""
    for file, edits in WORK.items():
        for before, added in edits:
            edit(package / file, before, added)
    rule = RULE.replace("costs: shared.logging", "costs: [late.logging, shared.logging]")
    (package / "rules" / "host" / "logging.yaml").write_text(rule)
    job = record(package / "run", Job(2, extra=lambda rank, step: {"save": (3.0, 9.0)[rank]}))
    for log in job.glob("ranks/*/steps.jsonl"):
        text = log.read_text()
        assert '"k": "save"' in text
        log.write_text(text.replace('"k": "save"', '"k": "log"'))

    diagnosis = diagnosed(package, job)
    late, shared = (diagnosis["facts"][group]["logging"] for group in ("late", "shared"))
    assert late["ms_per_step"] == pytest.approx(6.0, abs=0.1) and late["ranks"] == [1] and late["where"]
    assert shared["ms_per_step"] == pytest.approx(3.0, abs=0.1) and shared["where"]
    assert "host/logging" in {finding["rule"] for finding in diagnosis["findings"]}
