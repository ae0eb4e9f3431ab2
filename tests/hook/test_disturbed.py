"""A real job whose clock is set and of which a rank is stopped gets the diagnosis of the undisturbed one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ddpdoctor import analyze

from .recording import forked, run_recorded

LATE_MS = 40.0


@pytest.mark.torchrun
@pytest.mark.alone
@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_clock_is_set_and_a_rank_is_stopped(tmp_path, stopped: int) -> None:
    command = forked("disturbed.py", "--stopped", str(stopped), "--late-ms", str(LATE_MS))
    recorded = run_recorded(tmp_path, command)
    assert recorded.process.returncode == 0, recorded.process.stderr
    raw = [step["t"] for step in recorded.steps(0)]
    assert max(end - start for start, end in raw) > 4e9 and any(b[0] < a[0] for a, b in pairwise(raw))
    found = analyze(str(recorded.run))
    told = [note for note in found.notes if "suspended" in note or "clock of host" in note]
    assert any("back by 10 s" in note and "step 30." in note for note in told)
    assert any("forward by 2.2 min" in note and "step 60." in note for note in told)
    assert [
        note
        for note in told
        if note.startswith(f"Rank {stopped} was suspended for 4") and " in step 45" in note
    ]
    assert found.steps.set_aside["suspended"] == 2
    assert found.steps.measured + sum(found.steps.set_aside.values()) == found.steps.count == 90
    assert found.steps.mean_ms is not None and LATE_MS < found.steps.mean_ms < 3 * LATE_MS
    assert not found.healthy and found.findings[0].ranks == [1]
    assert found.findings[0].costs_ms_per_step == pytest.approx(LATE_MS, rel=0.3)
