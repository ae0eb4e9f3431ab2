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


def _case(snippet: Snippet, scene: str = "all") -> dict[str, Any]:
    tested = PACK.rules[snippet.rule].fixes[snippet.fix].tested
    assert tested is not None, f"{snippet.rule} fix {snippet.fix}: its field `tested` is missing"
    place = tested.stands
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
        "expected": "no training" if place == "loader" else tested.results,
        # Compression begins with the third step instead of the 1000th, of matrices of 8 x 8.
        "before": f"{unplaced}\n{before}".replace(
            "rank=2, start_powerSGD_iter=1000", "rank=1, start_powerSGD_iter=2"
        ),
        "step": step,
        "after": after,
        **{flag: flag in tested.job for flag in ("unused", "accumulates", "adam", "uneven")},
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


def test_fixes_say_that_their_snippet_is_tested_if_it_is() -> None:
    run = {(each.rule, each.fix) for each in SNIPPETS if each.kind == "python"}
    fixes = [(rule.id, number, fix) for rule in PACK.rules.values() for number, fix in enumerate(rule.fixes)]
    assert {(rule, number) for rule, number, fix in fixes if fix.tested is not None} == run


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
