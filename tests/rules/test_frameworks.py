"""The table of frameworks: its rows are arguments of the installed packages, and fixes are written with them."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
from typing import Any

import pytest

from ddpdoctor.diagnose.diagnosis import Fix
from ddpdoctor.diagnose.frameworks import Framework
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.rule_texts import render, render_snippet
from ddpdoctor.diagnose.selftest import outcome_of
from tests.launch.launched import python_with

PACK = load_rules(entry_points=False)
FRAMEWORKS = PACK.common.frameworks
PACKAGES = "/env/lib/python3.11/site-packages"

SIGNATURES = """
import importlib, inspect, json, pkgutil, sys
def taken(path):
    found = pkgutil.resolve_name(path)
    if inspect.ismodule(found):
        return [value for value in vars(found).values() if isinstance(value, str)]
    return list(inspect.signature(found).parameters)
def functions(owner):
    return [f"{name}.{inside}" for name, each in vars(owner).items() if inspect.isclass(each) for inside in vars(each)]
asked = json.loads(sys.argv[1])
signatures = {path: taken(path) for path in asked["objects"]}
modules = [importlib.import_module(name) for name in asked["modules"]]
print(json.dumps([signatures, [name for module in modules for name in functions(module)]]))
"""
MODULES = {
    "Lightning": [
        "lightning.pytorch.trainer.trainer",
        "lightning.pytorch.loops.training_epoch_loop",
        "lightning.pytorch.core.module",
        "lightning.pytorch.loops.evaluation_loop",
        "lightning.pytorch.callbacks.model_checkpoint",
    ],
    "accelerate": ["accelerate.accelerator"],
    "Transformers": ["transformers.trainer", "trl.trainer.sft_trainer"],
    "Ignite": ["ignite.engine.engine"],
    "MMEngine": ["mmengine.runner.runner", "mmengine.runner.loops", "mmengine.hooks.checkpoint_hook"],
    "DeepSpeed": ["deepspeed.runtime.engine", "deepspeed.runtime.pipe.engine"],
}
"""Where the functions of ``loops`` and ``calls`` are."""


@pytest.mark.extended
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_each_row_is_an_argument_of_the_installed_package(framework: Framework) -> None:
    python = python_with(framework.packages[0], *framework.parts)
    paths = [path for each in framework.objects.values() for path in (each.path, each.passes_on) if path]
    modules = MODULES.get(framework.name, [])
    asked = json.dumps({"objects": paths, "modules": modules})
    done = subprocess.run([python, "-c", SIGNATURES, asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    signatures, functions = json.loads(done.stdout.splitlines()[-1])
    for row in (row for row in framework.settings if row.argument is not None):
        target = framework.objects[row.object]
        taken = signatures[target.path] + (signatures[target.passes_on] if target.passes_on else [])
        newest = {
            render(row.argument, {"job": {"torch": "99.0"}}),
            render(row.argument, {"job": {"torch": "2.0"}}),
        }
        assert newest & set(taken), f"{row.setting}: {target.path} takes no {newest}"
        assert row.source.startswith("https://")
    for name in [*framework.loops, *(call.function for call in framework.calls)]:
        assert any(f".{each}".endswith(f".{name}") for each in functions), f"there is no {name}"


def through(*frames: tuple[str, str]) -> dict[str, Any]:
    lines = [{"file": f"{PACKAGES}/{file}", "line": 1, "function": function} for file, function in frames]
    return {"file": "/home/me/train.py", "line": 27, "function": "main", "through": lines}


LIGHTNING = through(
    ("lightning/pytorch/strategies/ddp.py", "DDPStrategy._setup_model"),
    ("lightning/pytorch/trainer/trainer.py", "Trainer.fit"),
)
FABRIC = through(
    ("lightning/fabric/strategies/ddp.py", "DDPStrategy.setup_module"),
    ("lightning/fabric/fabric.py", "Fabric.setup"),
)
ACCELERATE = through(("accelerate/accelerator.py", "Accelerator.prepare_model"))
TRANSFORMERS = through(
    ("accelerate/accelerator.py", "Accelerator.prepare_model"), ("transformers/trainer.py", "Trainer.train")
)
RAY = through(("ray/train/torch/train_loop_utils.py", "prepare_model"))
OWN = {"file": "/home/me/train.py", "line": 27, "function": "main"}


def fix_of(rule: str, number: int = 0, **facts: Any) -> Fix:
    outcome = outcome_of(PACK.rules[rule], PACK.common, facts)
    assert not outcome.errors
    return outcome.findings[0].fixes[number]


def broadcasts(where: dict[str, Any], torch: str = "2.12.0", **frameworks: str) -> Fix:
    return fix_of(
        "sync/buffer-broadcast",
        job={"world_size": 4, "torch": torch, "frameworks": frameworks},
        steps={"mean_ms": 40.0},
        ddp={"broadcast_buffers": True, "where": where},
        shared={"broadcast": {"ms_per_step": 3.0}},
    )


@pytest.mark.parametrize(
    ("where", "written", "call"),
    [
        (LIGHTNING, "Trainer(strategy=DDPStrategy(broadcast_buffers=False))", "DDPStrategy"),
        (FABRIC, "Fabric(strategy=DDPStrategy(broadcast_buffers=False))", "DDPStrategy"),
        (
            ACCELERATE,
            "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])",
            "DistributedDataParallelKwargs",
        ),
        (TRANSFORMERS, "TrainingArguments(ddp_broadcast_buffers=False)", "TrainingArguments"),
        (
            RAY,
            "prepare_model(model, parallel_strategy_kwargs=dict(broadcast_buffers=False))",
            "prepare_model",
        ),
    ],
)
def test_a_fix_is_in_the_words_of_who_called_the_constructor(
    where: dict[str, Any], written: str, call: str
) -> None:
    fix = broadcasts(where)
    assert fix.snippet is not None and written in fix.snippet and ast.parse(fix.snippet)
    assert "model = DistributedDataParallel(" not in fix.snippet and "train.py:27" not in fix.title
    assert fix.changed_at[0] == call and fix.settings == {"ddp.broadcast_buffers": "false"}


def test_a_constructor_that_the_script_calls_keeps_torch_s_words() -> None:
    """Whatever else the job has imported."""
    fix = broadcasts(OWN, lightning="2.6.6", transformers="5.0.0")
    assert (
        "DistributedDataParallel(model, broadcast_buffers=False)" in (fix.snippet or "")
        and not fix.changed_at
    )


def test_a_version_without_the_setting_keeps_torch_s_words() -> None:
    assert "TrainingArguments" not in (broadcasts(TRANSFORMERS, transformers="4.20.1").snippet or "")
    assert "TrainingArguments" in (broadcasts(TRANSFORMERS, transformers="4.40.1").snippet or "")


def test_the_argument_follows_torch_s_version() -> None:
    fix = broadcasts(LIGHTNING, torch="2.13.0+cpu", lightning="2.6.6")
    assert "DDPStrategy(forward_sync_buffers=False)" in (fix.snippet or "")


def test_several_settings_of_a_loader_are_one_call() -> None:
    fix = fix_of(
        "dataloader/starved",
        job={"world_size": 2, "frameworks": {"transformers": "5.23.0"}},
        steps={"mean_ms": 100.0},
        loader={"num_workers": 0, "where": TRANSFORMERS, "wait_ms": 50.0},
        host={"idle_cores": 8.0, "ranks_per_host": 2.0},
        shared={"data": {"ms_per_step": 50.0}},
    )
    assert fix.snippet is not None
    (call,) = [each for each in ast.walk(ast.parse(fix.snippet)) if isinstance(each, ast.Call)]
    named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert named.pop("dataloader_num_workers") >= 1
    assert named == {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 4}


@pytest.mark.parametrize("where", [LIGHTNING, FABRIC, ACCELERATE, TRANSFORMERS, RAY])
def test_every_fix_in_a_framework_s_words_is_python_and_torch_s_words_are_gone(where: dict[str, Any]) -> None:
    written = set()
    for rule in PACK.rules.values():
        for test in (test for test in rule.tests if test.fires):
            facts = copy.deepcopy(test.facts)
            for group in ("ddp", "loader"):
                facts.setdefault(group, {})["where"] = where
            outcome = outcome_of(rule, PACK.common, facts)
            assert not outcome.errors
            for fix in (fix for finding in outcome.findings for fix in finding.fixes if fix.changed_at):
                written.add(rule.id)
                assert ast.parse(fix.snippet or "")
                assert "= DistributedDataParallel(" not in (fix.snippet or "")
                assert fix.docs[0].startswith("https://")
    assert {"sync/buffer-broadcast", "ddp/unused-parameters", "hang/unused-parameter"} <= written


def test_each_row_of_each_framework_is_python() -> None:
    tree = {"job": {"torch": "2.13.0"}, "steps": {"micro_batches": 4.0}, "value": "fp16"}
    for framework in FRAMEWORKS:
        for row in framework.settings:
            arguments = f"{render(row.argument, tree)}={render(row.value, tree)}" if row.argument else ""
            written = render_snippet(framework.objects[row.object].form, {"arguments": arguments})
            assert ast.parse(f"{row.imports or ''}\n{written}")
        for call in framework.calls:
            assert call.setting is None or ast.parse(render_snippet(call.setting, tree | {"where": [OWN]}))


def callback(name: str, line: int, loop: str, **more: Any) -> dict[str, Any]:
    calls = [{"file": f"{PACKAGES}/{loop}", "line": 584, "function": "fit"}]
    return {"file": "/home/me/train.py", "line": line, "function": name, "callers": calls, **more}


@pytest.mark.parametrize(
    ("loop", "number"),
    [
        ("lightning/pytorch/trainer/trainer.py", "step = trainer.global_step"),
        ("transformers/trainer.py", "step = state.global_step"),
    ],
)
def test_code_for_a_hook_says_what_its_step_and_rank_are(loop: str, number: str) -> None:
    where = [callback("Dump.on_train_batch_end", 41, loop)]
    cost = {"ms_per_step": 20.0, "own_ms": 20.0, "late_ms": 20.0, "awake_ms": 19.0, "where": where}
    fix = fix_of(
        "rank-imbalance/host-work",
        job={"world_size": 2, "ranks_seen": 2, "device": "cpu"},
        steps={"mean_ms": 60.0},
        late={"host": cost | {"ranks": [0]}},
    )
    assert "train.py:41" in fix.title and number in (fix.snippet or "") and "rank = " in (fix.snippet or "")
    assert ast.parse(fix.snippet or "")


@pytest.mark.parametrize("function", ["Trainer.evaluate", "evaluate"], ids=["", "Python before 3.11"])
def test_a_hook_of_the_user_s_that_evaluates_is_the_one_to_change(function: str) -> None:
    loop = "transformers/trainer.py"
    where = callback("Eval.on_step_end", 60, loop, through=through((loop, function))["through"])
    fix = fix_of(
        "sync/blocking-collective",
        job={"world_size": 2, "frameworks": {"transformers": "5.23.0"}},
        steps={"mean_ms": 13.0},
        shared={"collective": {"ms_per_step": 3.4, "operation": "all_gather", "where": [where]}},
    )
    assert fix.title == f"Call {function} every N steps at train.py:60 in Eval.on_step_end"
    assert "state.global_step" in (fix.snippet or "") and not fix.changed_at and ast.parse(fix.snippet or "")


@pytest.mark.parametrize(
    ("file", "function", "written"),
    [
        ("lightning/pytorch/core/module.py", "LightningModule.log", "on_step=False"),
        ("accelerate/accelerator.py", "Accelerator.gather_for_metrics", "accelerator.reduce(totals"),
    ],
)
def test_a_metric_is_reduced_by_the_framework_s_own_function(file: str, function: str, written: str) -> None:
    where = {**OWN, "through": through((file, function))["through"]}
    collective = {"ms_per_step": 3.4, "operation": "all_reduce", "where": [where]}
    facts = {
        "job": {"world_size": 2, "frameworks": {"lightning": "2.6.6"}},
        "steps": {"mean_ms": 13.0},
        "shared": {"collective": collective},
    }
    outcome = outcome_of(PACK.rules["sync/blocking-collective"], PACK.common, facts)
    (fix,) = outcome.findings[0].fixes
    headline = outcome.headlines["sync/blocking-collective"]
    assert "all_reduce called from Python at train.py:27 in main" in headline
    assert written in (fix.snippet or "") and "train.py:27" in fix.title and ast.parse(fix.snippet or "")


@pytest.mark.parametrize("own", [True, False], ids=["a line of the model's", "a line of the loop's"])
def test_an_evaluation_of_the_framework_s_loop_is_set_by_its_argument(own: bool) -> None:
    file = f"{PACKAGES}/transformers/trainer.py"
    frame = {"file": file, "line": 2863, "function": "Trainer.evaluate"}
    loop = {"file": file, "line": 1576, "function": "Trainer.train"}
    line = {"file": "/home/me/model.py", "line": 27, "function": "Net.forward", "callers": [frame]}
    where = line if own else {**frame, "callers": [loop]}
    evaluation = {"count": 9, "total_s": 4.0, "share": 0.12, "every": 5, "where": [where]}
    facts = {
        "job": {"world_size": 2, "frameworks": {"transformers": "5.23.0"}},
        "steps": {"source": "step-log"},
        "run": {"wall_s": 31.0, "steps": 60, "evaluation": evaluation},
    }
    outcome = outcome_of(PACK.rules["run/evaluation"], PACK.common, facts)
    first, *others = outcome.findings[0].fixes
    assert "TrainingArguments(eval_steps=" in (first.snippet or "")
    assert not any("less often" in fix.title for fix in others)


SFT = through(
    ("accelerate/utils/operations.py", "_gpu_gather"),
    ("trl/trainer/sft_trainer.py", "SFTTrainer.compute_loss"),
    ("transformers/trainer.py", "Trainer.train"),
)
COUNTS = through(
    ("accelerate/utils/operations.py", "_gpu_gather"),
    ("transformers/trainer.py", "Trainer._get_num_items_in_batch"),
    ("transformers/trainer.py", "Trainer.train"),
)


@pytest.mark.parametrize(("share", "severity"), [(0.8, "info"), (0.4, "warning")])
def test_a_call_that_a_setting_changes_is_told_beside_those_that_none_changes(
    share: float, severity: str
) -> None:
    """With what part of the calls is theirs, and as information where the setting would save little."""
    where = [{**SFT, "share": share}, {**COUNTS, "share": 1 - share}]
    facts = {
        "job": {"world_size": 2, "frameworks": {"transformers": "5.23.0", "trl": "1.16.0"}},
        "steps": {"mean_ms": 50.0},
        "shared": {"collective": {"ms_per_step": 9.0, "operation": "all_gather", "where": where}},
    }
    outcome = outcome_of(PACK.rules["sync/blocking-collective"], PACK.common, facts)
    (finding,) = outcome.findings
    assert finding.severity == severity
    theirs = f"with SFTTrainer.compute_loss of TRL ({100 * share:.0f} % of the calls), this blocks all ranks"
    assert theirs in outcome.headlines["sync/blocking-collective"]
    assert "average_tokens_across_devices=False" in (finding.fixes[0].snippet or "")


@pytest.mark.parametrize(
    ("version", "backend", "type_"),
    [("0.19.8", "gloo", "fp16"), ("0.19.8", "nccl", "bf16"), ("0.14.0", "nccl", "bfp16")],
)
def test_deepspeed_s_own_reduction_is_set_by_keys_of_its_json(version: str, backend: str, type_: str) -> None:
    where = through(("deepspeed/runtime/engine.py", "DeepSpeedEngine.backward"))
    facts = {
        "job": {"world_size": 2, "ranks_seen": 2, "is_ddp": False, "backend": backend, "frameworks": {"deepspeed": version}},
        "steps": {"mean_ms": 50.0, "micro_batches": 2.0},
        "communication": {"transfer_ms": 12.0, "bytes_per_step": 1e9},
        "shared": {"communication": {"ms_per_step": 12.0, "where": [where]}},
    }  # fmt: skip
    (finding,) = outcome_of(PACK.rules["allreduce/communication-bound"], PACK.common, facts).findings
    written = [fix.snippet or "" for fix in finding.fixes if "initialize" in fix.changed_at]
    assert "config.update(gradient_accumulation_steps=4)" in written[0]
    assert f"config.update(communication_data_type='{type_}')" in written[1]


def test_a_checkpoint_of_the_framework_s_loop_is_set_by_its_argument() -> None:
    where = through(
        ("transformers/trainer.py", "Trainer._save_checkpoint"), ("transformers/trainer.py", "Trainer.train")
    )
    saved = {"count": 9, "total_s": 4.0, "share": 0.12, "every": 5, "where": [where]}
    facts = {
        "job": {"world_size": 2, "frameworks": {"transformers": "5.23.0"}},
        "steps": {"source": "step-log"},
        "run": {"wall_s": 31.0, "steps": 60, "checkpoints": saved},
    }
    (finding,) = outcome_of(PACK.rules["run/checkpoints"], PACK.common, facts).findings
    (fix,) = finding.fixes
    assert "TrainingArguments(save_steps=" in (fix.snippet or "")
