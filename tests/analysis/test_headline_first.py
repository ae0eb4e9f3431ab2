"""The table of findings begins with the finding of the headline."""

from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "torchrec" / "sst_long_a2a_optimizer_3"


@pytest.mark.skipif(not TRACE.is_dir(), reason="public traces are not here")
def test_a_measured_cost_that_informs_comes_after_the_headline():
    diagnosis = analyze([str(TRACE)], Options(cache=False, jobs=1))
    first, second, *_ = diagnosis.findings
    assert first.rule == diagnosis.verdict.rule == "gpu/no-tensor-cores"
    assert (second.rule, second.severity) == ("rank-imbalance/host-work", "info")
