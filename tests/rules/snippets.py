"""Snippets of fixes as reports show them: rendered from drawn facts, their kind, and where each stands in a script."""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.rule import Rule
from ddpdoctor.diagnose.selftest import outcome_of

from .snippet_code import snippet_kind

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
    {"steps": {"source": "trace"}},
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


@functools.cache
def rendered() -> list[Snippet]:
    """Every snippet of every rule, each different code once."""
    found: dict[Any, Snippet] = {}
    seen: set[Snippet] = set()
    # What is written for frameworks follows from their table, see test_frameworks.py.
    common = msgspec.structs.replace(PACK.common, short_window=None, frameworks=[])
    for rule in PACK.rules.values():
        # A fix that is shown is known by its number, in the place of its sources.
        fixes = [msgspec.structs.replace(fix, docs=[str(number)]) for number, fix in enumerate(rule.fixes)]
        numbered = msgspec.structs.replace(rule, fixes=fixes)
        for facts in _drawn(rule):
            outcome = outcome_of(numbered, common, facts)
            assert not outcome.errors, (rule.id, outcome.errors)
            for fix in (fix for finding in outcome.findings for fix in finding.fixes if fix.snippet):
                snippet = Snippet(rule.id, int(fix.docs[0]), fix.title, fix.snippet or "")
                if snippet in seen:
                    continue
                seen.add(snippet)
                code = snippet.text if snippet.kind == "shell" else snippet.sections
                found.setdefault((rule.id, snippet.fix, code), snippet)
    return list(found.values())


def _drawn(rule: Rule) -> Iterator[dict[str, Any]]:
    read = " ".join(f"{fix.when} {fix.snippet}" for fix in rule.fixes)
    for test in rule.tests:
        for draw in _DRAWS if test.fires else ():
            if draw and not any(f"{group}.{name}" in read for group in draw for name in draw[group]):
                continue
            facts: dict[str, Any] = copy.deepcopy(test.facts)
            for group, values in draw.items():
                facts.setdefault(group, {}).update(values)
            yield facts
