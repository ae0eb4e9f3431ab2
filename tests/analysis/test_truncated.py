"""Profiler traces whose file breaks off: any step may lack events there, so nothing is found in them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddpdoctor import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis, Verdict
from ddpdoctor.report.summary import cost_sentence

FOLDER = Path(__file__).parents[3] / "shared/traces/torchrec/sst_long_a2a_optimizer_5"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ../shared")


def cut(tmp_path: Path, ranks: int) -> Diagnosis:
    """The analysis of four traces, of which ``ranks`` are cut to two fifths."""
    for place, file in enumerate(sorted(FOLDER.glob("*.json.gz"))):
        text = gzip.decompress(file.read_bytes())
        (tmp_path / file.name).write_bytes(
            gzip.compress(text[: 2 * len(text) // 5] if place < ranks else text)
        )
    return analyze([str(tmp_path)])


def test_the_other_ranks_are_measured(tmp_path: Path) -> None:
    diagnosis = cut(tmp_path, 1)
    assert len(diagnosis.facts["breakdown"]) and diagnosis.facts["job"]["ranks_seen"] == 3
    assert diagnosis.steps.measured > 1
    assert any("1 truncated trace left out of the measurement" in note for note in diagnosis.notes)
    worded = replace(diagnosis, findings=[], verdict=Verdict(None, "a headline with a truncated name"))
    assert cost_sentence(worded).startswith("A step takes ")


def test_nothing_is_found_where_all_are_truncated(tmp_path: Path) -> None:
    diagnosis = cut(tmp_path, 4)
    assert not diagnosis.healthy and diagnosis.verdict.headline.startswith(
        "Cannot tell: all 4 traces are truncated ("
    )
    assert not diagnosis.findings
    assert diagnosis.facts["steps"]["truncated"] is True and cost_sentence(diagnosis) == ""
