"""Which recording speaks where logs or traces of some ranks are lost, of a job on GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report import words
from tests.generator import Config, Plant
from tests.generator.rundirectory import generate_run

OPTIONS = Options(cache=False, jobs=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Rank 1 waits 10 ms for its data in every step."""
    run = tmp_path_factory.mktemp("gpus") / "run"
    generate_run(
        Config(world_size=2, steps=4, warmup_steps=24, plants=(Plant("slow_data", (1,), 10.0),)), run
    )
    return run


def without(whole: Path, lost: str, folder: Path) -> Diagnosis:
    run = Path(shutil.copytree(whole, folder / "run"))
    for path in run.glob(lost):
        path.unlink()
    return analyze(str(run), OPTIONS)


@pytest.mark.parametrize(
    "lost", ["ranks/00000/steps.jsonl", "ranks/00001/steps.jsonl", "ranks/*/steps.jsonl"]
)
def test_a_lost_step_log_changes_no_cause(whole, tmp_path, lost) -> None:
    before, after = analyze(str(whole), OPTIONS), without(whole, lost, tmp_path)
    told = [(finding.rule, finding.ranks, finding.costs_ms_per_step) for finding in after.findings]
    assert told == [
        (finding.rule, finding.ranks, pytest.approx(finding.costs_ms_per_step, rel=0.01))
        for finding in before.findings
    ]
    assert words.all_ranks_label(after) == "all ranks" and words.has_all_ranks(after)


def test_a_lost_trace_leaves_open_what_is_waiting(whole, tmp_path) -> None:
    """The step logs of all ranks are there: the wait for the rank without a trace was called the network's."""
    found = without(whole, "ranks/00001/trace.json*", tmp_path)
    assert "allreduce/communication-bound" in {skipped.rule for skipped in found.skipped}
    (exposed,) = [finding for finding in found.findings if finding.rule == "allreduce/exposed"]
    assert (
        exposed.severity == "warning"
        and "The collectives of 1 of 2 ranks were recorded" in exposed.explanation
    )
    assert found.job.ranks_seen == [0, 1] and words.all_ranks_label(found) == "the recorded rank"
    assert words.part("comm_transfer", found) == "communication or waiting"
    assert found.steps.samples_per_s is not None
