"""Users paste snippets: each is executed in a two-rank job wherever a CPU can, otherwise parsed and its names looked up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hook.recording import forked, plain_environment
from tests.rules.snippets import PACK, Snippet, rendered

SNIPPETS = rendered()

_RUNS: dict[str, dict[int, str]] = {
    "allreduce/communication-bound": {0: "wrap: another layout", 1: "wrap: another layout", 2: "setup: other", 3: "train accumulates: last bits", 6: "setup: same bits"},
    "allreduce/exposed": {1: "wrap: same bits"},
    "allreduce/not-overlapped": {0: "wrap: same bits", 1: "wrap: same bits"},
    "allreduce/redundant-sync": {0: "train accumulates: last bits"},
    "allreduce/small-buckets": {0: "wrap: same bits"},
    "dataloader/one-rank-late": {0: "loader: same bits", 1: "loader: same bits", 3: "setup: same bits"},
    "dataloader/slow-copy": {0: "loader: same bits"},
    "dataloader/starved": {1: "loader: same bits", 2: "loader: same bits", 3: "loader: same bits"},
    "dataloader/worker-restart": {0: "loader: same bits", 1: "loop: other"},
    "ddp/bucket-view": {0: "wrap: same bits"},
    "ddp/static-graph": {0: "wrap unused: same bits", 1: "wrap unused: same bits"},
    "ddp/unused-parameters": {0: "wrap: same bits"},
    "gpu/launch-bound": {0: "setup adam: last bits", 2: "setup compiles: last bits", 4: "setup adam: last bits"},
    "gpu/memory-full": {0: "wrap: same bits", 1: "step: same bits", 2: "setup adam: same bits", 3: "wrap: another layout"},
    "gpu/no-tensor-cores": {0: "setup: same bits"},
    "hang/different-collectives": {0: "step: same bits", 1: "step: same bits"},
    "hang/loader-worker-killed": {1: "loader: same bits"},
    "hang/not-reached": {0: "step: same bits", 2: "loader: same bits", 3: "step: same bits", 4: "step: same bits"},
    "hang/rank-died": {0: "loader: same bits"},
    "hang/rank-raised": {0: "setup: same bits"},
    "hang/uneven-inputs": {0: "loop: same bits", 1: "loop: same bits"},
    "hang/unused-parameter": {0: "wrap unused: same bits", 1: "setup: same bits"},
    "host/memory-pressure": {0: "loader: same bits", 1: "setup: same bits"},
    "host/outside-work": {0: "step: same bits", 1: "step: same bits", 2: "step: same bits"},
    "host/python-work": {2: "step: same bits"},
    "host/slow-optimizer": {0: "setup adam: last bits", 2: "setup compiles: last bits"},
    "memory/device-growing": {0: "step: same bits"},
    "memory/growing": {0: "step: same bits", 1: "setup: same bits", 2: "setup: same bits"},
    "memory/imbalance": {1: "after: same bits", 2: "setup: same bits"},
    "memory/workers-growing": {0: "setup: same bits", 1: "setup: same bits", 2: "loader: same bits"},
    "rank-imbalance/alternating": {0: "step: same bits", 1: "setup: same bits", 3: "setup: same bits", 5: "step: same bits"},
    "rank-imbalance/garbage-collection": {0: "setup: same bits", 1: "loop: same bits"},
    "rank-imbalance/host-work": {0: "step: same bits", 1: "step: same bits", 4: "step: same bits"},
    "rank-imbalance/intermittent": {2: "setup: same bits"},
    "rank-imbalance/lone-evaluation": {0: "step: same bits"},
    "rank-imbalance/uneven-work": {0: "loader: same bits", 1: "setup: same bits"},
    "run/every-nth-step": {0: "step: same bits"},
    "run/pause": {1: "loader: same bits", 2: "step: same bits"},
    "run/steps-get-longer": {0: "step: same bits"},
    "sync/blocking-collective": {0: "step: same bits", 1: "step: same bits", 2: "step: same bits"},
    "sync/buffer-broadcast": {0: "wrap: same bits"},
    "sync/checkpoint": {0: "step: same bits", 2: "step: same bits"},
    "sync/device-sync": {0: "step: same bits", 2: "step: same bits"},
    "sync/explicit-barrier": {0: "update: same bits"},
}
"""By rule and number of the fix: where a Python snippet stands, and how the parameters compare with those of a training without it."""


def _case(snippet: Snippet, scene: str = "all") -> dict[str, Any]:
    where, _, _ = _RUNS[snippet.rule][snippet.fix].partition(":")
    place, *flags = where.split()
    unplaced, before, step, after = snippet.sections
    case = {"key": [snippet.rule, snippet.fix, snippet.text, scene], "place": place, "scene": scene}
    case |= {"unused": "unused" in flags, "accumulates": "accumulates" in flags, "adam": "adam" in flags}
    if place in ("step", "train", "update", "loop") and not step:
        unplaced, step = "", unplaced
    if place in ("after", "loader"):
        unplaced, after = "", unplaced
    if place == "loader":
        after += "\nfor _ in zip(range(2), loader): pass"
    return {**case, "before": f"{unplaced}\n{before}", "step": step, "after": after}


def _run(cases: list[dict[str, Any]], folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The result of each case. A case that stops the job has an error, and those after it run in a further job."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    while cases:
        (folder / "cases.json").write_text(json.dumps(cases))
        (folder / "results").write_text("")
        command = forked("snippets.py", str(folder / "cases.json"), str(folder / "results"))
        try:
            done = subprocess.run(
                command, env=plain_environment(), capture_output=True, text=True, timeout=30 + len(cases), cwd=folder
            )
            why = done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            why = "it does not end"
        results = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
        found |= {tuple(each["key"]): each for each in results}
        if len(results) < len(cases):
            found[tuple(cases[len(results)]["key"])] = {"error": why}
        cases = cases[len(results) + 1 :]
    return found


def test_snippets_run_and_keep_the_results_that_they_should(tmp_path: Path) -> None:
    python = [each for each in SNIPPETS if each.kind == "python"]
    unknown = [(each.rule, each.fix, each.title) for each in python if each.fix not in _RUNS.get(each.rule, {})]
    assert not unknown, "say in _RUNS where these stand"
    cases = [_case(each) for each in python if "compiles" not in _RUNS[each.rule][each.fix] and "Process" not in each.text]
    wrong = []
    for (rule, fix, text, scene), result in _run(cases, tmp_path).items():
        expected = _RUNS[rule][fix].partition(": ")[2]
        if result.get("results") != expected:
            wrong.append(f"{rule} fix {fix} ({scene}): {result.get('error') or result['results']}, not {expected}\n{text}")
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(cases)}", *wrong])
