"""Snippets of fixes as reports show them: rendered from drawn facts, their kind, and where each stands in a script."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.rule import Rule
from ddpdoctor.diagnose.selftest import outcome_of, snippet_kind

PACK = load_rules(entry_points=False)

_DRAWS: list[dict[str, dict[str, Any]]] = [
    {},
    {"job": {"device": "cpu"}},
    {"job": {"device": "cuda"}},
    {"job": {"device": "cpu", "backend": "gloo"}},
    {"job": {"device": "cuda", "backend": "nccl"}},
    {"job": {"device": "cuda", "backend": "cpu:gloo,cuda:nccl"}},
    {"job": {"device": "cuda", "backend": "gloo"}},
    {"job": {"device": "cpu", "torch": "2.13.0"}},
    {"job": {"device": "cpu", "torch": "2.12.1"}},
    {"ddp": {"static_graph": True}},
    {"ddp": {"find_unused_parameters": True}},
    {"loader": {"sampler": "_InfiniteConstantSampler"}},
    {"loader": {"sampler": "_InfiniteConstantSampler"}, "job": {"device": "cuda"}},
    {"loader": {"sampler": "DistributedSampler", "num_workers": 2, "batch_size": 4}},
]
"""What is laid over the facts of each test that fires a rule."""


class Snippet(NamedTuple):
    """One text of one fix."""

    rule: str
    fix: int
    """Number of the fix in its rule."""
    title: str
    text: str

    @property
    def kind(self) -> str:
        """``python``, ``gpu`` for Python that only a GPU can run, or ``shell``."""
        return snippet_kind(self.text)

    @property
    def sections(self) -> tuple[str, str, str, str]:
        """Code without comments: what no comment places, and what stands before the loop, in each step, and after the loop."""
        found = {"": "", "before": "", "in": "", "after": ""}
        section = ""
        for line in self.text.splitlines(keepends=True):
            if match := re.match(r"# (before the loop|in each step|at each|after the loop)", line):
                section = {"before": "before", "after": "after"}.get(match[1].split()[0], "in")
            found[section] += line
        return tuple(ast.unparse(ast.parse(each)) for each in found.values())  # type: ignore[return-value]


def rendered(removed: bool = False) -> list[Snippet]:
    """Every snippet of every rule, each different code once; ``removed``: also with each fact taken away."""
    found: dict[Any, Snippet] = {}
    for rule in PACK.rules.values():
        for facts in _drawn(rule, removed):
            for number, text in enumerate(rule.fixes):
                if text.snippet is None:
                    continue
                for snippet in _of(rule, number, facts):
                    code = snippet.text if snippet.kind == "shell" else snippet.sections
                    found.setdefault((rule.id, number, code), snippet)
    return list(found.values())


def _of(rule: Rule, number: int, facts: dict[str, Any]) -> Iterator[Snippet]:
    alone = msgspec.structs.replace(rule, fixes=[rule.fixes[number]])
    common = msgspec.structs.replace(PACK.common, short_window=None)
    try:
        outcome = outcome_of(alone, common, facts)
    except msgspec.ValidationError:  # a cost without its milliseconds
        return
    assert not outcome.errors, (rule.id, outcome.errors)
    for finding in outcome.findings:
        for fix in finding.fixes:
            yield Snippet(rule.id, number, fix.title, fix.snippet or "")


def _drawn(rule: Rule, removed: bool) -> Iterator[dict[str, Any]]:
    for test in rule.tests:
        if not test.fires:
            continue
        for draw in _DRAWS:
            facts: dict[str, Any] = copy.deepcopy(test.facts)
            for group, values in draw.items():
                facts.setdefault(group, {}).update(values)
            yield facts
        for group in test.facts if removed else ():
            for name in test.facts[group] if isinstance(test.facts[group], dict) else ():
                facts = copy.deepcopy(test.facts)
                del facts[group][name]
                yield facts
