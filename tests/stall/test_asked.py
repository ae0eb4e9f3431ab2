"""Jobs that somebody ended: what comes after the signal is an effect of it, what came before is not."""

from __future__ import annotations

from ddpdoctor.analysis import analyze

from .recorded import NOW_NS, Stopped


def diagnosed(run):
    return analyze(str(run.path))


GONE_NS = NOW_NS - 300_000_000_000
"""When the ranks' processes were found to be gone."""


def ended_by_somebody(path, asked_ns):
    """torchrun leaves with 1 after SIGTERM; one rank fell to it, the other to SIGKILL after the grace, having lost the first."""
    run = Stopped(path / "run", exit_code=1).asked(15, asked_ns)
    run.raised(1, "RuntimeError", "Connection reset by peer", at_ns=GONE_NS)
    return run.ended(0, signal=15).ended(1, signal=9)


def test_what_comes_after_the_signal_is_no_failure(tmp_path):
    diagnosis = diagnosed(ended_by_somebody(tmp_path, GONE_NS - 30_000_000_000))
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]
    assert diagnosis.verdict.headline.startswith("The job was ended by SIGTERM (exit code 1), in step ")
    assert "; last seen: " in diagnosis.verdict.headline
    assert "rank 1 at train.py:70 in parse" in diagnosis.verdict.headline
    assert {each.rank: each.state for each in diagnosis.standing}[0] == "ended by SIGTERM"


def test_what_came_before_it_is(tmp_path):
    diagnosis = diagnosed(ended_by_somebody(tmp_path, GONE_NS + 2_000_000_000))
    assert diagnosis.verdict.headline.startswith("The job failed: ")
    assert diagnosis.verdict.rule in ("hang/rank-died", "hang/rank-raised")


def test_a_job_that_ends_in_order_although_it_was_asked_to_end(tmp_path):
    diagnosis = diagnosed(Stopped(tmp_path / "run", exit_code=0).asked(15, NOW_NS))
    assert "ended by" not in diagnosis.verdict.headline and diagnosis.standing == []
