"""The rule pack: each rule tests itself, explains itself, and names its sources."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.diagnosis import Coverage
from ddpdoctor.diagnose.engine import diagnose
from ddpdoctor.diagnose.load import RuleSet, load_rules, packaged_folder
from ddpdoctor.diagnose.rule import Rule
from ddpdoctor.diagnose.selftest import outcome_of, run_tests, with_cost_shares
from ddpdoctor.diagnose.verdict import ANY
from ddpdoctor.measure.facts import Facts
from ddpdoctor.measure.taxonomy import LateCause, SharedCause
from tests.diagnose.ruled import rule as stub

PACK = load_rules(entry_points=False)
RULES = list(PACK.rules.values())
each_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.id for rule in RULES])

REQUIRED = """
allreduce/late-rank allreduce/slow-transfer allreduce/communication-bound allreduce/not-overlapped
allreduce/small-buckets allreduce/redundant-sync allreduce/gloo-on-gpu allreduce/slow-link
rank-imbalance/slow-compute rank-imbalance/uneven-work rank-imbalance/host-work
rank-imbalance/intermittent rank-imbalance/garbage-collection rank-imbalance/throttled-gpu
dataloader/starved dataloader/one-rank-late dataloader/slow-copy dataloader/worker-restart
sync/explicit-barrier sync/blocking-collective sync/device-sync sync/checkpoint
sync/buffer-broadcast ddp/unused-parameters ddp/data-parallel ddp/bucket-view ddp/static-graph
gpu/launch-bound gpu/host-bound gpu/no-tensor-cores gpu/low-utilisation gpu/memory-full gpu/link-width
gpu/hardware-errors host/cpu-starved host/memory-pressure
"""


def test_ids_that_people_link_to_exist() -> None:
    assert set(REQUIRED.split()) <= set(PACK.rules)


def test_each_cause_has_a_rule() -> None:
    paths = {f"late.{cause}" for cause in LateCause if cause is not LateCause.TOTAL}
    paths |= {f"shared.{cause}" for cause in SharedCause}
    assert paths - {path for rule in RULES for path in rule.cost_paths} == set()


@each_rule
def test_its_own_tests_pass(rule: Rule) -> None:
    failures = [
        f"{result.name}: {failure}" for result in run_tests(rule, PACK.common) for failure in result.failures
    ]
    assert not failures


@each_rule
def test_it_is_tested_from_all_sides(rule: Rule) -> None:
    assert any(test.fires for test in rule.tests), "no test fires it"
    assert any(not test.fires and not test.skipped for test in rule.tests), "no test keeps it silent"
    assert any(test.skipped for test in rule.tests), "no test takes its input away"


@each_rule
def test_it_says_when_it_is_wrong_and_where_its_numbers_come_from(rule: Rule) -> None:
    assert len(rule.limits) > 40
    assert all(entry.source and entry.unit for entry in rule.thresholds.values())
    assert rule.fixes
    assert all(url.startswith("https://") for fix in rule.fixes for url in fix.docs)


@each_rule
def test_every_threshold_is_used(rule: Rule) -> None:
    text = (packaged_folder() / f"{rule.id}.yaml").read_text(encoding="utf-8") + PACK.common.cost_when
    own = rule.thresholds.keys() - PACK.common.thresholds.keys()
    unused = [name for name in own if f"t.{name}" not in text]
    assert not unused


@each_rule
def test_every_fix_is_shown_by_a_test(rule: Rule) -> None:
    for fix in rule.fixes:
        alone = msgspec.structs.replace(rule, fixes=[fix])
        outcomes = [outcome_of(alone, PACK.common, test.facts) for test in rule.tests if test.fires]
        assert any(outcome.findings and outcome.findings[0].fixes for outcome in outcomes), fix.title


_SHOWN = {
    "amp.autocast": {"bf16": "torch.bfloat16", "fp16": "torch.float16"},
    "ddp.accumulate": {"true": "no_sync()"},
    "ddp.comm_hook": {"bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"},
    "torch.matmul_precision": {"high": 'set_float32_matmul_precision("high")'},
}
"""What a snippet has for a setting that is no argument of the same name."""


@each_rule
def test_a_snippet_shows_what_the_settings_try(rule: Rule) -> None:
    for test in rule.tests:
        for finding in outcome_of(rule, PACK.common, test.facts).findings:
            for fix in finding.fixes:
                for name, value in fix.settings.items() if fix.snippet else ():
                    argument = "OMP_NUM_THREADS" if name == "torch.threads" else name.partition(".")[2]
                    shown = _SHOWN.get(name, {}).get(value, f"{argument}={value}")
                    assert shown.lower() in fix.snippet.lower(), (test.name, name, value, fix.snippet)


@each_rule
def test_no_snippet_s_own_code_has_the_name_of_a_fact(rule: Rule) -> None:
    for fix in rule.fixes:
        code = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "", fix.snippet or "", flags=re.DOTALL)
        assert not [name for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", code) if facts_view.is_fact(name)]


@each_rule
def test_its_causes_exist(rule: Rule) -> None:
    assert all(effect.rule == "*" or effect.rule in PACK.rules for effect in rule.effects)


@each_rule
def test_the_conditions_of_its_causes_can_be_evaluated(rule: Rule) -> None:
    """With the facts of its own tests, and a cause that costs as much as it does."""
    for effect, test in itertools.product(rule.effects, rule.tests):
        if effect.rule == ANY or test.skipped:
            continue
        cause = stub(
            effect.rule, when="true", **({"costs": rule.costs} if rule.costs else {"costs_ms": "5.0"})
        )
        pack = RuleSet(PACK.common, {rule.id: rule, cause.id: cause})
        facts = msgspec.convert(with_cost_shares(test.facts), Facts)
        errors = diagnose(facts, pack, coverage=Coverage(steps=100, ranks=facts.job.ranks_seen)).errors
        assert not [error for error in errors if "effect_of" in error], test.name


@each_rule
def test_no_absent_fact_breaks_it(rule: Rule) -> None:
    """Any fact may be absent: the rule then stays silent, is skipped, or says less, but never fails."""
    for test in rule.tests:
        whole = with_cost_shares(test.facts)
        for path in _paths(whole):
            try:
                outcome = outcome_of(rule, PACK.common, _without(whole, path))
            except msgspec.ValidationError:  # a cost without its milliseconds is no cost at all
                continue
            assert not outcome.errors, (test.name, path)


def test_every_cost_has_a_rule() -> None:
    """A measured cause that no rule reads would be lost time without a name."""
    read = {path for rule in RULES for path in rule.cost_paths}
    costs = {f"{group}.{name}" for group in ("late", "shared") for name in facts_view.fields_of(_kind(group))}
    # All lateness together has the rules of its parts.
    assert costs - read == {"late.total"}


def _kind(group: str) -> Any:
    return facts_view.fields_of(facts_view.Facts)[group]


def _paths(nested: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in nested.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, name))


def _without(nested: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    copied = copy.deepcopy(nested)
    group = copied
    for name in path[:-1]:
        group = group[name]
    del group[path[-1]]
    return copied


def _in_a_model(value: Any) -> Any:
    """Facts with every line in a model's forward."""
    if isinstance(value, list):
        return [_in_a_model(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "file" in value and "line" in value:
        return {**value, "function": "LM.forward", "callers": []}
    return {name: _in_a_model(each) for name, each in value.items()}


def test_what_a_model_does_is_not_called_outside_of_it() -> None:
    """Between phases, a line may be in the forward of another model; but no sentence says that it is in none."""
    for rule in PACK.rules.values():
        for test in (test for test in rule.tests if test.fires):
            outcome = outcome_of(rule, PACK.common, _in_a_model(test.facts))
            for finding in outcome.findings:
                texts = [finding.title, finding.explanation, outcome.headlines[rule.id]]
                if any("LM.forward" in text for text in texts):
                    said = " ".join(texts)
                    assert "outside the model" not in said and "Outside data loading" not in said, said
