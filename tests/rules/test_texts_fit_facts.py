"""What a rule says does not contradict the facts: of a job without workers, without DDP, or on CPUs, no rule speaks of them."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.selftest import outcome_of

PACK = load_rules(entry_points=False)
EXCEPT = {
    "dataloader/worker-restart",  # fires only where there are workers
    "ddp/bucket-view",  # these need a device, by the facts of their own tests
    "ddp/data-parallel",
    "hang/device-error",
    "hang/not-reached",
    "hang/stuck-together",
    "memory/imbalance",
    "rank-imbalance/intermittent",
}


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("loader.num_workers", 0, r"a worker that|the queue|empty queue|workers that restart|starts its workers|worker process"),
        ("job.is_ddp", False, r"DDP's gradient reduction already|in addition to DDP"),
        ("job.device", "cpu", r"\bGPUs?\b|\bkernel times|\bdevices?\b|CUDA"),
    ],
)  # fmt: skip
def test_no_text_speaks_of_what_the_job_lacks(fact: str, value: Any, words: str) -> None:
    wrong: dict[str, str] = {}
    for rule in PACK.rules.values():
        for test in (test for test in rule.tests if test.fires and rule.id not in EXCEPT):
            facts = copy.deepcopy(test.facts)
            group, _, name = fact.partition(".")
            facts.setdefault(group, {})[name] = value
            outcome = outcome_of(rule, PACK.common, facts)
            for finding in outcome.findings:
                text = " ".join([finding.title, outcome.headlines[finding.rule], finding.explanation])
                for found in re.finditer(words, text):
                    wrong[rule.id] = text[max(0, found.start() - 80) : found.end() + 40]
    assert not wrong
