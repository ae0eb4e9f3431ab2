"""A rank that is late in every step, and once stops for long: what lasts has its price, whatever the stall was."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from tests.measure.grids import pairs_first
from tests.measure.made import late_of, on, simple
from tests.measure.recorded import Job, record

LASTING_MS = 6.0


def said(tmp_path, phase, stall, whose, stall_ms):
    def extra(rank, step):
        longer = {phase: LASTING_MS} if rank == 1 else {}
        if step == 30 and rank in whose:
            longer[stall] = longer.get(stall, 0.0) + stall_ms
        return longer

    run = record(tmp_path / "run", Job(data=0.2, steps=60, extra=extra))
    return analyze(str(run), Options(cache=False))


@pytest.mark.parametrize(
    ("phase", "whose", "stall", "stall_ms"),
    pairs_first(
        ("host", "data", "backward"),
        ((1,), (2,), (0, 1, 2, 3)),
        ("same", "forward", "save"),
        (300.0, 1000.0, 2000.0),
    ),
)
def test_the_lasting_fault_keeps_its_rank_and_price(phase, stall, whose, stall_ms, tmp_path):
    found = said(tmp_path, phase, phase if stall == "same" else stall, whose, stall_ms)
    first = found.findings[0]
    assert not found.healthy and found.verdict.rule == first.rule
    assert first.ranks == [1] and first.costs_ms_per_step == pytest.approx(LASTING_MS, rel=0.1)
    assert [finding.rule for finding in found.findings].count("run/pause") == 1


@pytest.mark.parametrize("cycles", [15, 40])
@pytest.mark.parametrize("stall_ms", [60.0, 1000.0])
def test_a_stall_in_a_recording_that_leaves_no_step_out(cycles, stall_ms):
    longer = LASTING_MS * on(1, 4, 1.0) + stall_ms * on(1, 4, 1.0) * (np.arange(cycles) == 7)[:, None, None]
    late = late_of(simple(4, cycles, jitter=0.02, host=0.5 + longer))
    assert late["host"].ranks == [1] and late["host"].ms_per_step == pytest.approx(LASTING_MS, rel=0.15)
