"""Jobs of frameworks, each healthy, with one fault, and with the fix as it is worded: it runs, and it gains."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from ddpdoctor import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.report.finding_view import snippet
from tests.hook.recording import JOBS

from .launched import clean_environment, python_with, run_under

SCRIPT = JOBS / "frameworks" / "with_faults.py"
pytestmark = [pytest.mark.extended, pytest.mark.torchrun, pytest.mark.slow, pytest.mark.alone]
BUFFERS = {"mib": 32}
"""Sending them takes longer than everything else in a step."""
STARTS_RANKS = ("lightning", "ray")
"""Their scripts start the ranks, without torchrun."""


class Case(NamedTuple):
    """A fault of a framework's job; the fix that ddpdoctor words."""

    framework: str
    fault: dict[str, float]
    rule: str
    call: str
    """The call in the fix whose arguments the job gets."""
    line: str = ""
    """What the line calls that the fix names; empty: the same."""
    given: Mapping[str, Any] = MappingProxyType({})
    """Settings with the fault."""
    needs: tuple[str, ...] = ()


CASES = [
    Case("lightning", BUFFERS, "sync/buffer-broadcast", "DDPStrategy"),
    Case("accelerate", BUFFERS, "sync/buffer-broadcast", "DistributedDataParallelKwargs"),
    Case("transformers", BUFFERS, "sync/buffer-broadcast", "TrainingArguments"),
    Case("trl", BUFFERS, "sync/buffer-broadcast", "SFTConfig", needs=("datasets", "accelerate")),
    Case("ray", BUFFERS, "sync/buffer-broadcast", "dict", "prepare_model", needs=("pyarrow", "tensorboardX")),
    Case("ignite", {"read_ms": 2}, "dataloader/starved", "auto_dataloader"),
    Case("mmengine", {"read_ms": 2}, "dataloader/starved", "update", "Runner"),
    # It has two workers unless it is told otherwise.
    Case("deepspeed", {"read_ms": 8}, "dataloader/starved", "deepspeed_io"),
    Case(
        "lightning",
        {},
        "run/evaluation",
        "Trainer",
        given={"val_check_interval": 10, "check_val_every_n_epoch": None},
    ),
    Case(
        "transformers",
        {},
        "run/evaluation",
        "TrainingArguments",
        given={"eval_strategy": "steps", "eval_steps": 5},
    ),
    Case(
        "transformers",
        {"mib": 64},
        "sync/checkpoint",
        "TrainingArguments",
        given={
            "ddp_broadcast_buffers": False,
            "save_strategy": "steps",
            "save_steps": 5,
            "save_total_limit": 1,
        },
    ),
]


def diagnosed(
    tmp: Path, name: str, fault: dict[str, float], arguments: dict[str, Any], *needs: str
) -> Diagnosis:
    return diagnosis_of(tmp, SCRIPT, name, json.dumps(fault), json.dumps(arguments), needs=needs)


def diagnosis_of(
    tmp: Path, script: Path, name: str, *arguments: str, needs: tuple[str, ...] = ()
) -> Diagnosis:
    python = python_with(name, *needs)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [python, *([] if name in STARTS_RANKS else torchrun), str(script), name, *arguments]
    tmp.mkdir()
    environment = clean_environment(
        HF_HOME=str(tmp),
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="true",
        CUDA_VISIBLE_DEVICES="",
        RAY_USAGE_STATS_ENABLED="0",
    )
    recorded = run_under(tmp, command, environment=environment, timeout_s=400)
    assert recorded.process.returncode == 0, recorded.process.stderr
    return analyze(str(recorded.run))


def found(diagnosis: Diagnosis, rule: str) -> Finding | None:
    return next((finding for finding in diagnosis.findings if finding.rule == rule), None)


def arguments_of(code: str, call: str) -> dict[str, Any]:
    """What a function or method of that name gets; as text what is no literal."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (one,) = [node for node in calls if getattr(node.func, "attr", getattr(node.func, "id", "")) == call]
    return {str(each.arg): _value(each.value) for each in one.keywords}


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.framework}-{case.rule}")
def test_a_fault_in_a_framework_s_words(tmp_path: Path, case: Case) -> None:
    def run(name: str, fault: dict[str, float], arguments: dict[str, Any]) -> Diagnosis:
        return diagnosed(tmp_path / name, case.framework, fault, arguments, *case.needs)

    healthy = run("healthy", {}, {})
    assert healthy.verdict.rule != case.rule and (found(healthy, case.rule) is None or case.fault)
    faulty = run("faulty", case.fault, dict(case.given))
    finding = found(faulty, case.rule)
    assert finding is not None and (case.rule == faulty.verdict.rule or case.given)
    # The line to change, not the one that calls the framework's loop.
    code = finding.fixes[0].snippet or ""
    named = re.findall(rf"# {SCRIPT.name}:(\d+)", code)
    # Of an evaluation, the framework's loop may be all that was seen.
    assert named or case.rule == "run/evaluation"
    for number in map(int, named):
        assert f"{case.line or case.call}(" in SCRIPT.read_text().splitlines()[number - 1]
    fixed = run("fixed", case.fault, {**case.given, **arguments_of(code, case.call)})
    if case.given:
        assert found(fixed, case.rule) is None
        return
    assert finding.costs_ms_per_step and fixed.steps.mean_ms and faulty.steps.mean_ms
    # A fix says so if it gains less than the cost, as workers do where few cores are idle.
    said = re.search(r"expect ([\d.]+) ms → ([\d.]+) ms", finding.fixes[0].title)
    promised_ms = float(said[1]) - float(said[2]) if said else finding.costs_ms_per_step
    assert faulty.steps.mean_ms - fixed.steps.mean_ms > 0.5 * promised_ms


def test_a_line_logged_in_each_step_of_transformers(tmp_path: Path) -> None:
    faulty = diagnosed(
        tmp_path / "faulty", "transformers", {}, {"logging_strategy": "steps", "logging_steps": 1}
    )
    finding = found(faulty, "sync/blocking-collective")
    assert finding is not None and "Trainer._maybe_log_save_evaluate" in finding.explanation
    assert "TrainingArguments(" in SCRIPT.read_text().splitlines()[finding.where[0].line - 1]
    arguments = arguments_of(finding.fixes[0].snippet or "", "TrainingArguments")
    fixed = diagnosed(tmp_path / "fixed", "transformers", {}, {"logging_strategy": "steps", **arguments})
    assert found(fixed, "sync/blocking-collective") is None


def test_what_lightning_s_loop_does_is_information(tmp_path: Path) -> None:
    """No setting of Lightning 2.6 changes it."""
    healthy = diagnosed(tmp_path / "healthy", "lightning", {}, {})
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
