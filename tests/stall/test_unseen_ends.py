"""Ends that nobody saw, or that other witnesses tell of: the rank that the others lost is named, never one that lost it."""

from __future__ import annotations

import pytest

from ddpdoctor import analyze

from .recorded import NOW_NS, TRAIN, Stopped, main_finding
from .test_parting import Numbered

LOST = "Connection closed by peer [127.0.0.1]:23424"
LATER_NS = NOW_NS + 10**9


def test_a_rank_whose_end_nobody_saw(tmp_path) -> None:
    """It was killed before it was looked at, and left no exit code."""
    run = Stopped(tmp_path / "run").raised(0, "RuntimeError", LOST)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks, finding.title) == ("hang/rank-died", [1], "Rank 1 died")
    assert "Rank 0 then raised" in finding.explanation


def test_all_ranks_that_only_lost_each_other(tmp_path) -> None:
    run = Stopped(tmp_path / "run").raised(0, "RuntimeError", LOST).raised(1, "RuntimeError", LOST)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.title) == (
        "hang/rank-raised",
        "Ranks 0 and 1 lost the connection to each other",
    )


@pytest.mark.parametrize("known", [{"code": None, "signal": None}, {"code": None, "signal": 11}])
def test_faulthandler_tells_the_signal_that_the_kernel_did_not(tmp_path, known) -> None:
    """The parent of a rank of mp.spawn waits for it, and is faster."""
    run = Stopped(tmp_path / "run").ended(1, in_order=False, **known)
    text = f'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "{TRAIN}", line 33 in f\n'
    (run.path / "ranks/00001/faults.txt").write_text(text)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks, finding.title) == ("hang/rank-died", [1], "Rank 1 died (SIGSEGV)")


def test_ranks_that_called_different_collectives_and_whose_ends_nobody_saw(tmp_path) -> None:
    run = Numbered(tmp_path / "run")
    run.order(0, ("bwd", 50), ("bwd", 50), ("coll", 57), until=63)
    run.order(1, ("bwd", 50), ("bwd", 50), ("bwd", 50), until=63)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks) == ("hang/different-collectives", [1])


@pytest.mark.parametrize("number", [2, 15])
def test_an_interrupt_of_one_rank_that_python_left_in_order(tmp_path, number) -> None:
    """Its exit handlers ran before the signal ended it; the launcher ended the other one later, which had lost it."""
    run = Stopped(tmp_path / "run").raised(1, "KeyboardInterrupt", "").raised(0, "RuntimeError", LOST)
    run.ended(1, signal=number, in_order=True, seen_ns=NOW_NS)
    run.ended(0, signal=15, in_order=True, seen_ns=LATER_NS)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks) == ("hang/rank-died", [1])


def test_a_rank_that_calls_more_than_those_that_are_through(tmp_path) -> None:
    """No network is suspected where the other one had ended in order."""
    run = Stopped(tmp_path / "run").raised(1, "RuntimeError", LOST)
    run.ended(0, code=0, in_order=True, step=200)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks) == ("hang/rank-raised", [1])
    assert "Rank 0 had ended in order, in step 200" in finding.explanation
    assert "network" not in finding.explanation
