"""The log of a job that runs for long is thinned by the rank itself, while it runs."""

from __future__ import annotations

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.hook.environment import HookOptions
from ddpdoctor.measure.graph import LEFT_OUT
from ddpdoctor.rundir.compaction import thinned_steps

from .recording import forked, run_recorded

BUDGET_BYTES, STEPS = 48 * 1024, 2_000


@pytest.mark.extended
def test_the_log_of_a_long_job_stays_small_and_says_what_is_gone(tmp_path):
    job = forked("long_log.py", str(BUDGET_BYTES), str(STEPS), ranks=0)
    recorded = run_recorded(tmp_path, job, HookOptions(profile_steps=None))
    assert recorded.process.returncode == 0, recorded.process.stderr
    place = recorded.folder(0)
    kept = {step["step"] for step in recorded.steps(0)}
    gone = {number for first, last in thinned_steps(str(place)) for number in range(first, last + 1)}
    assert len(gone) > STEPS / 8 and gone.isdisjoint(kept) and gone | kept == set(range(STEPS))
    assert recorded.info(0)["hook"]["errors"] == [] and recorded.lines(0)[-1].get("end") is True
    found = analyze([str(recorded.run)], Options(cache=False))
    assert found.steps.count == STEPS and found.steps.set_aside[LEFT_OUT] == len(gone)
