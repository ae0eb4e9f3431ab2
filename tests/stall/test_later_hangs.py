"""A job that seemed to hang, went on, and hung later: each host has the record of the last hang that its own launcher reported."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.analysis import analyze

from .recorded import BARRIER, FIRST_PID, LOCKED, NOW_NS, REDUCING, WAITING, Stopped, main_finding

S = 10**9
SINCE_NS = NOW_NS - 310 * S
"""The last step before the hang in which the job ended."""


def hung_again(tmp_path, resumed_ns: int) -> Stopped:
    """Rank 0 waits in backward for rank 1, whose host has only the record of a hang that ended at ``resumed_ns``. In that one rank 1
    waited in a barrier, for a checkpoint of rank 0."""
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING).rank(1, "other", LOCKED)
    run.seen(0, WAITING, waits=True).stall(silent_since_ns=SINCE_NS, looked_ns=NOW_NS)
    row = {"rank": 1, "pid": FIRST_PID + 1, "answered": True, "process": WAITING, "waits": True}
    earlier = {"schema": "ddpdoctor.stall/2", "state": "resumed", "paused_in": "save", "silent_s": 400.0}
    times = {"detected_ns": resumed_ns - 60 * S, "looked_ns": resumed_ns}
    folder = run.path / "hosts" / "host2"
    folder.mkdir()
    document = {**earlier, **times, "silent_since_ns": resumed_ns - 400 * S, "ranks": [row]}
    (folder / "stall.json").write_text(json.dumps(document))
    return run


@pytest.mark.parametrize("before_s", [3600, -1], ids=["an hour before", "in the step before"])
def test_a_hang_of_which_one_host_has_only_the_record_of_an_earlier_one(tmp_path, before_s: int) -> None:
    diagnosis = analyze([str(hung_again(tmp_path, SINCE_NS - before_s * S).path)])
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks) == ("hang/not-reached", [1])
    assert finding.where[0].function == LOCKED[1][2] != BARRIER[1][2]
    assert diagnosis.verdict.headline.startswith("The job hung for 310 s until it ended with exit code 1")


def test_a_hang_that_another_host_saw_end_was_none(tmp_path) -> None:
    """The launcher of the first host was killed before it looked again."""
    diagnosis = analyze([str(hung_again(tmp_path, SINCE_NS + 305 * S).path)])
    assert not any(finding.rule == "hang/not-reached" for finding in diagnosis.findings)
    assert "hung" not in diagnosis.verdict.headline
