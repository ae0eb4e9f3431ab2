"""Jobs of frameworks, each healthy, with one fault, and with the fix as it is worded: it runs, and it gains."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.report.finding_view import snippet
from tests.hook.recording import JOBS

from .launched import clean_environment, python_with, run_under

SCRIPT = JOBS / "frameworks" / "with_buffers.py"
pytestmark = [pytest.mark.extended, pytest.mark.torchrun, pytest.mark.slow, pytest.mark.alone]
MIB = 32
"""Of buffers: sending them takes longer than everything else in a step."""


def diagnosed(tmp: Path, name: str, mib: int, arguments: dict[str, Any]) -> Diagnosis:
    return diagnosis_of(tmp, SCRIPT, name, str(mib), json.dumps(arguments))


def diagnosis_of(tmp: Path, script: Path, name: str, *arguments: str) -> Diagnosis:
    python = python_with(name)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [python, *([] if name == "lightning" else torchrun), str(script), name, *arguments]
    tmp.mkdir()
    environment = clean_environment(HF_HOME=str(tmp), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    recorded = run_under(tmp, command, environment=environment, timeout_s=400)
    assert recorded.process.returncode == 0, recorded.process.stderr
    return analyze(str(recorded.run))


def found(diagnosis: Diagnosis, rule: str) -> Finding | None:
    return next((finding for finding in diagnosis.findings if finding.rule == rule), None)


def arguments_of(snippet: str, call: str) -> dict[str, Any]:
    calls = [node for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Call)]
    (one,) = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == call]
    return {str(each.arg): ast.literal_eval(each.value) for each in one.keywords}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("lightning", "DDPStrategy"),
        ("accelerate", "DistributedDataParallelKwargs"),
        ("transformers", "TrainingArguments"),
    ],
)
def test_broadcast_buffers(tmp_path: Path, name: str, call: str) -> None:
    healthy = diagnosed(tmp_path / "healthy", name, 0, {})
    assert healthy.verdict.rule not in ("sync/buffer-broadcast", "sync/blocking-collective")
    faulty = diagnosed(tmp_path / "faulty", name, MIB, {})
    assert faulty.verdict.rule == "sync/buffer-broadcast"
    finding = found(faulty, "sync/buffer-broadcast")
    assert finding is not None
    # The line to change, not the one that calls the framework's loop.
    text = SCRIPT.read_text().splitlines()[finding.where[0].line - 1]
    assert f"{call}(" in text
    fix = finding.fixes[0]
    arguments = arguments_of(fix.snippet or "", call)
    fixed = diagnosed(tmp_path / "fixed", name, MIB, arguments)
    assert found(fixed, "sync/buffer-broadcast") is None
    assert fixed.steps.median_ms is not None and faulty.steps.median_ms is not None
    assert finding.costs_ms_per_step is not None
    gained_ms = faulty.steps.median_ms - fixed.steps.median_ms
    assert gained_ms > 0.5 * finding.costs_ms_per_step


def test_a_line_logged_in_each_step_of_transformers(tmp_path: Path) -> None:
    faulty = diagnosed(
        tmp_path / "faulty", "transformers", 0, {"logging_strategy": "steps", "logging_steps": 1}
    )
    finding = found(faulty, "sync/blocking-collective")
    assert finding is not None and "Trainer._maybe_log_save_evaluate" in finding.explanation
    assert "TrainingArguments(" in SCRIPT.read_text().splitlines()[finding.where[0].line - 1]
    arguments = arguments_of(finding.fixes[0].snippet or "", "TrainingArguments")
    fixed = diagnosed(tmp_path / "fixed", "transformers", 0, {"logging_strategy": "steps", **arguments})
    assert found(fixed, "sync/blocking-collective") is None


def test_what_lightning_s_loop_does_is_information(tmp_path: Path) -> None:
    """No setting of Lightning 2.6 changes it."""
    healthy = diagnosed(tmp_path / "healthy", "lightning", 0, {})
    finding = found(healthy, "sync/blocking-collective")
    assert finding is None or (finding.severity == "info" and not finding.fixes)
    if finding is not None:
        assert "_broadcast_sigterm_tensor" in finding.explanation


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_callback_is_named_at_its_own_line(tmp_path: Path, name: str) -> None:
    script = JOBS / "frameworks" / "with_callbacks.py"
    lines = script.read_text().splitlines()
    one = diagnosis_of(tmp_path / "rank0", script, name, "rank0")
    assert one.verdict.rule == "rank-imbalance/host-work"
    assert one.findings[0].ranks == [0] and "self.entropy.note(" in lines[one.findings[0].where[0].line - 1]
    assert "Probe.on_" in one.verdict.headline
    every = diagnosis_of(tmp_path / "all", script, name, "all")
    # Beside other load, a rank may also be late in the same line.
    finding = found(every, "host/outside-work") or found(every, "host/python-work")
    assert finding is not None and "self.entropy.note(" in lines[finding.where[0].line - 1]
    assert "Probe.on_" in finding.where[0].function
    # The fix as it is worded, in the place of the line that it names.
    fix = next(fix for fix in finding.fixes if "step %" in (fix.snippet or ""))
    place = finding.where[0].line - 1
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    lines[place : place + 1] = [indent + line for line in snippet(finding, fix).splitlines()]
    changed = tmp_path / "changed.py"
    changed.write_text("\n".join(lines))
    fixed = diagnosis_of(tmp_path / "fixed", changed, name, "all")
    assert found(fixed, finding.rule) is None
    assert finding.costs_ms_per_step is not None and fixed.steps.mean_ms and every.steps.mean_ms
    assert every.steps.mean_ms - fixed.steps.mean_ms > 0.5 * finding.costs_ms_per_step
