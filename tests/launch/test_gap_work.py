"""Work between the phases of a step, on one rank of a real job: told as what it is, with the line of the gap."""

from __future__ import annotations

import pytest

from ddpdoctor import analyze
from tests.hook.recording import JOBS, TORCHRUN
from tests.launch.launched import run_under


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-profile",)], ids=["window", "no window"])
def test_products_after_the_optimizer_are_no_slower_computation(options, tmp_path):
    job = [*TORCHRUN, "2", str(JOBS / "gap_work.py"), "--place", "after-optimizer", "--ms", "30", "--on", "0"]
    recorded = run_under(tmp_path, job, *options)
    found = [f for f in analyze(str(recorded.run)).findings if f.rule.startswith("rank-imbalance/")]
    late = [f for f in found if f.severity != "info"]
    assert [(f.rule, f.ranks) for f in late] == [("rank-imbalance/host-work", [0])]
    where = late[0].where[0]
    assert "products" in {place.function for place in where.way}
