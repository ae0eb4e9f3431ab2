"""Jobs of frameworks, each healthy, with one fault, and with the fix as it is worded: it runs, and it gains."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from tests.hook.recording import JOBS

from .launched import clean_environment, python_with, run_under

SCRIPT = JOBS / "frameworks" / "with_buffers.py"
pytestmark = [pytest.mark.extended, pytest.mark.torchrun, pytest.mark.slow, pytest.mark.alone]
MIB = 32
"""Of buffers: sending them takes longer than everything else in a step."""


def diagnosed(tmp: Path, name: str, mib: int, arguments: dict[str, Any]) -> Diagnosis:
    python = python_with(name)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [python, *([] if name == "lightning" else torchrun), str(SCRIPT), name, str(mib), json.dumps(arguments)]  # fmt: skip
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
