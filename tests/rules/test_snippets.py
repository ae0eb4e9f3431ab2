"""Users paste snippets: each is executed in a two-rank job wherever a CPU can, otherwise parsed and its names looked up."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from tests.hook.recording import forked, plain_environment
from tests.rules.snippets import PACK, Snippet, rendered

SNIPPETS = rendered()
pytestmark = pytest.mark.skipif(
    tuple(map(int, version("torch").split(".")[:2])) < (2, 13), reason="snippets are for torch 2.13 and newer"
)

_RUNS: dict[str, dict[int, str]] = {
    "allreduce/communication-bound": {
        0: "wrap: another layout",
        1: "wrap: another layout",
        2: "setup: other",
        3: "train accumulates: last bits",
        7: "setup: same bits",
    },
    "allreduce/exposed": {1: "wrap: same bits"},
    "allreduce/not-overlapped": {
        0: "wrap: same bits",
        1: "wrap: last bits",
        2: "wrap: same bits",
        3: "wrap: same bits",
    },
    "allreduce/redundant-sync": {0: "train accumulates: last bits"},
    "allreduce/small-buckets": {0: "wrap: same bits"},
    "dataloader/one-rank-late": {0: "loader: no training", 1: "loader: no training", 3: "setup: same bits"},
    "dataloader/slow-copy": {0: "loader: no training"},
    "dataloader/starved": {
        1: "loader: no training",
        2: "loader: no training",
        3: "loader: no training",
        4: "loader: no training",
    },
    "dataloader/worker-restart": {0: "loader: no training", 1: "loop: other"},
    "ddp/bucket-view": {0: "wrap: same bits"},
    "ddp/static-graph": {0: "wrap unused: same bits", 1: "wrap unused: same bits"},
    "ddp/unused-parameters": {0: "wrap: same bits"},
    "gpu/launch-bound": {
        2: "setup adam: last bits",
        3: "setup: last bits",
        4: "setup: last bits",
        6: "setup adam: last bits",
    },
    "gpu/memory-full": {
        0: "wrap: same bits",
        1: "step: same bits",
        2: "setup adam: same bits",
        3: "wrap: another layout",
    },
    "gpu/no-tensor-cores": {0: "setup: same bits"},
    "hang/different-collectives": {0: "step: same bits", 1: "step: same bits"},
    "hang/loader-worker-killed": {1: "loader: no training"},
    "hang/not-reached": {
        0: "step: same bits",
        2: "loader: no training",
        3: "step: same bits",
        4: "step: same bits",
    },
    "hang/rank-died": {0: "loader: no training"},
    "hang/rank-raised": {0: "setup: same bits"},
    "hang/rendezvous": {0: "setup: same bits"},
    "hang/uneven-inputs": {0: "loop uneven: same bits", 1: "loop uneven: other"},
    "hang/unused-parameter": {0: "wrap unused: same bits", 1: "setup: same bits"},
    "host/memory-pressure": {0: "loader: no training", 1: "setup: same bits"},
    "host/outside-work": {0: "step: same bits", 1: "step: same bits", 2: "step: same bits"},
    "host/python-work": {3: "step: same bits"},
    "host/slow-optimizer": {0: "setup adam: last bits", 2: "setup: last bits"},
    "memory/device-growing": {0: "step: same bits"},
    "memory/growing": {0: "step: same bits", 1: "setup: same bits", 2: "setup: same bits"},
    "memory/imbalance": {1: "after: same bits", 2: "setup: same bits"},
    "memory/workers-growing": {0: "setup: same bits", 1: "setup: same bits", 2: "loader: no training"},
    "rank-imbalance/alternating": {
        0: "step: same bits",
        1: "setup: same bits",
        3: "setup: same bits",
        5: "step: same bits",
    },
    "rank-imbalance/garbage-collection": {0: "setup: same bits", 1: "loop: same bits"},
    "rank-imbalance/host-work": {0: "step: same bits", 1: "step: same bits", 4: "step: same bits"},
    "rank-imbalance/intermittent": {2: "setup: same bits"},
    "rank-imbalance/lone-evaluation": {0: "step: same bits"},
    "rank-imbalance/uneven-work": {0: "loader: no training", 1: "setup: same bits"},
    "run/checkpoints": {0: "step: same bits", 2: "step: same bits"},
    "run/evaluation": {0: "step: same bits", 1: "step: same bits", 2: "step: same bits"},
    "run/every-nth-step": {0: "step: same bits"},
    "run/long-end": {1: "step: same bits", 2: "after: same bits"},
    "run/long-preparation": {0: "setup: same bits", 1: "wrap: same bits", 2: "wrap: same bits"},
    "run/pause": {1: "loader: no training", 2: "step: same bits"},
    "run/steps-get-longer": {0: "step: same bits"},
    "sync/blocking-collective": {0: "step: same bits", 1: "step: same bits", 2: "step: same bits"},
    "sync/buffer-broadcast": {0: "wrap: same bits"},
    "sync/checkpoint": {0: "step: same bits", 2: "step: same bits"},
    "sync/device-sync": {0: "step: same bits", 2: "step: same bits"},
    "sync/explicit-barrier": {0: "update: same bits"},
}
"""By rule and number of the fix: where a Python snippet stands, and how the parameters compare with those of a training without it."""


def _case(snippet: Snippet, scene: str = "all") -> dict[str, Any]:
    where, _, expected = _RUNS[snippet.rule][snippet.fix].partition(": ")
    place, *flags = where.split()
    unplaced, before, step, after = snippet.sections
    if place == "loop" and "train_step(" not in snippet.text:
        place = "loader"
    if place in ("step", "train", "update", "loop") and not step:
        unplaced, step = "", unplaced
    elif place in ("after", "loader"):
        unplaced, after = "", unplaced
    return {
        "key": [snippet.rule, snippet.fix, snippet.text, scene],
        "place": place,
        "scene": scene,
        "wraps": place == "wrap",
        "expected": "no training" if place == "loader" else expected,
        "before": f"{unplaced}\n{before}",
        "step": step,
        "after": after,
        **{flag: flag in flags for flag in ("unused", "accumulates", "adam", "uneven")},
    }


def _python(*places: str) -> list[Snippet]:
    """Snippets that a CPU can run, at these places."""
    return [
        each
        for each in SNIPPETS
        if each.kind == "python" and _case(each)["place"] in places and not _is_slow(each)
    ]


def _is_slow(snippet: Snippet) -> bool:
    """Whether it compiles, starts processes, or looks at every object: seconds."""
    return any(name in snippet.text for name in ("compile(", "ProcessPool", "num_workers=", "tracemalloc"))


def _communicates(snippet: Snippet) -> bool:
    return snippet.kind != "shell" and any(name in "".join(snippet.sections) for name in _COLLECTIVES)


_COLLECTIVES = ("all_reduce(", "all_gather(", "barrier(", "new_group(", "dcp.save(", "dcp.async_save(")


def _run(cases: list[dict[str, Any]], folder: Path, most_s: float) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The result of each case. A case that stops the job has an error, and those after it run in a further job."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    left = cases
    while left:
        (folder / "cases.json").write_text(json.dumps(left))
        (folder / "results").write_text("")
        command = forked("snippets.py", str(folder / "cases.json"), str(folder / "results"), str(most_s))
        try:
            done = subprocess.run(
                command, env=plain_environment(), capture_output=True, text=True, timeout=280, cwd=folder
            )
            why = done.stderr[-3000:]
        except subprocess.TimeoutExpired:
            why = "it does not end"
        results = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
        found |= {tuple(each["key"]): each for each in results}
        if len(results) < len(left):
            found[tuple(left[len(results)]["key"])] = {"error": why}
        left = left[len(results) + 1 :]
    return found


_WITHIN = ("same bits", "last bits", "other")


def _check(cases: list[dict[str, Any]], folder: Path, most_s: float = 20) -> None:
    wrong = []
    results = _run(cases, folder, most_s)
    for case in cases:
        result, (rule, fix, text, scene) = results[tuple(case["key"])], case["key"]
        expected, got = case["expected"], result.get("results")
        if got != expected and not (got in _WITHIN and _WITHIN.index(got) < _WITHIN.index(expected)):
            wrong.append(f"{rule} fix {fix} ({scene}): {result.get('error') or got}, not {expected}\n{text}")
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(cases)}", *wrong])


def test_it_is_known_where_each_snippet_stands() -> None:
    python = [each for each in SNIPPETS if each.kind == "python"]
    assert not [
        (each.rule, each.fix, each.title) for each in python if each.fix not in _RUNS.get(each.rule, {})
    ]


def test_every_branch_of_a_snippet_is_drawn() -> None:
    shown: dict[tuple[str, int], str] = {}
    for each in SNIPPETS:
        shown[each.rule, each.fix] = shown.get((each.rule, each.fix), "") + each.text + "\n"
    unseen = []
    for rule in PACK.rules.values():
        for number, fix in enumerate(rule.fixes):
            pieces = [text for _, kind, text in Environment().lex(fix.snippet or "") if kind == "data"]
            lines = [line.strip() for piece in pieces for line in piece.splitlines()]
            unseen += [
                (rule.id, line)
                for line in lines
                if line != "#" and line not in shown.get((rule.id, number), "")
            ]
    assert not unseen


def test_snippets_run_to_their_end_and_keep_the_results(tmp_path: Path) -> None:
    _check(
        [_case(each) for each in _python("setup", "wrap", "step", "train", "update", "loop", "after")],
        tmp_path,
    )


def test_snippets_stand_on_one_rank_and_inside_no_sync(tmp_path: Path) -> None:
    steps = _python("step")
    alone = [_case(each, "one") for each in steps if not _communicates(each)]
    _check(alone + [_case(each, "no_sync") for each in steps], tmp_path)


def test_what_all_ranks_must_call_says_so() -> None:
    silent = [
        each for each in SNIPPETS if _communicates(each) and not re.search(r"(every|all) ranks?", each.text)
    ]
    assert not silent, [(each.rule, each.text) for each in silent]


def _wraps() -> list[Snippet]:
    """Snippets that only give DDP other arguments."""
    return [
        each
        for each in _python("wrap")
        if re.fullmatch(r"model = DistributedDataParallel\(.*\)", each.sections[0])
    ]


def _arguments(snippet: Snippet) -> dict[str, str]:
    call = ast.parse(snippet.sections[0]).body[0].value  # type: ignore[attr-defined]
    return {each.arg: ast.unparse(each.value) for each in call.keywords}


def test_all_that_a_report_may_propose_runs_together(tmp_path: Path) -> None:
    """DDP with all the arguments that fixes give it, and then no_sync(), or all that is pasted behind the training step."""
    arguments: dict[str, str] = {}
    for each in _wraps():
        arguments |= _arguments(each)
    arguments["find_unused_parameters"] = "False"
    assert arguments["static_graph"] == "True" and len(arguments) >= 5
    wrap = "model = DistributedDataParallel(model, {})".format(
        ", ".join(f"{k}={v}" for k, v in arguments.items())
    )
    cases = [_case(each) for each in _python("train") if "or step == 0" in each.sections[0]]
    assert len(cases) == 2  # of the rules redundant-sync and communication-bound
    steps = [_case(each) for each in _python("step") if "dcp.save(" not in each.text]
    joined = {part: "\n".join(case[part] for case in steps) for part in ("before", "step", "after")}
    hooks = [_case(each) for each in _python("setup") if "register_comm_hook" in each.text]
    cases += [
        {**case, "key": hook["key"], "before": hook["before"], "expected": "other"}
        for hook in hooks
        for case in cases[:1]
    ]
    cases.append({**steps[0], **joined})
    optimizer = "optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)"
    together = [{**case, "before": f"{wrap}\n{optimizer}\n{case['before']}", "wraps": True} for case in cases]
    _check(together, tmp_path)


@pytest.mark.extended
def test_snippets_with_processes_run(tmp_path: Path) -> None:
    """Loaders first: their workers are forks, which may deadlock once this process has trained."""
    once = {}
    for each in SNIPPETS:
        if each.kind == "python" and (_is_slow(each) or _case(each)["place"] == "loader"):
            code = re.sub(r"(num_workers|batch_size)=\d+", r"\1", "".join(each.sections))
            once.setdefault((each.rule, each.fix, code), each)
    cases = [_case(each) for each in once.values()]
    _check(sorted(cases, key=lambda case: case["place"] != "loader"), tmp_path, most_s=120)
