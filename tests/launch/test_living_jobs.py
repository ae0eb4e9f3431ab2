"""A job that lives is analysed meanwhile: whether it hangs is for its launcher's side to say, which looks at what the ranks use."""

from __future__ import annotations

import time

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.stall import standstill

from .test_namespaces import UNSHARED, may_unshare
from .watched import forked_job, watched

LOOKED_S = 3.0
"""After which a rank in a long step has said so, and that was copied."""


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("before", [(), (*UNSHARED, "--kill-child")], ids=["here", "in a container"])
def test_a_long_batch_is_no_hang_to_who_looks_meanwhile(tmp_path, monkeypatch, before) -> None:
    if before and not may_unshare():
        pytest.skip("no pid namespace may be made here")
    monkeypatch.setattr(standstill, "_LEAST_SILENCE_S", 0.1)
    monkeypatch.setattr(standstill, "_LEAST_SILENT_STEPS", 0.0)
    job = forked_job("quiet", 2, "--at", "3", "--for-s", str(2 * LOOKED_S), "--steps", "6")
    with watched(tmp_path, job, 60.0, {}, before) as living:
        assert living.mark("slow")
        time.sleep(LOOKED_S)
        diagnosis = analyze(str(living.run))
        assert not living.when("done"), "all of that while it ran"
        assert living.finish() == 0, living.stderr
    assert "hang" not in diagnosis.verdict.headline
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]
    assert diagnosis.standing == []
