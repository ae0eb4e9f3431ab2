"""A recorded run with a further profiler window: which of them is analysed."""

import json
import shutil
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import UnusableInput

FIXTURE = Path(__file__).parents[2] / "fixtures" / "slow-data-one-rank"
OPTIONS = {"cache": False, "jobs": 1}


@pytest.fixture
def run(tmp_path):
    """The fixture whose only window was asked for while the job ran."""
    shutil.copytree(FIXTURE, tmp_path / "run")
    for folder in (tmp_path / "run" / "ranks").iterdir():
        (folder / "trace.json.gz").rename(folder / "trace.2.json.gz")
        info = json.loads((folder / "rank.json").read_text())
        info["captures"] = [{"number": 1, "state": "skipped"}, {"number": 2, "state": "saved"}]
        (folder / "rank.json").write_text(json.dumps(info))
    return tmp_path / "run"


def test_the_window_that_was_asked_for_is_taken_and_none_is_taken_for_another(run):
    def said(diagnosis):
        facts = diagnosis.facts["steps"]
        return [(f.rule, f.ranks, f.costs_ms_per_step) for f in diagnosis.findings], facts["operators_seen"]

    whole = said(analyze(str(FIXTURE), Options(**OPTIONS)))
    assert said(analyze(str(run), Options(window=2, **OPTIONS))) == whole
    assert said(analyze(str(run), Options(**OPTIONS)))[1] != whole[1]


def test_a_window_that_there_is_not_is_one_sentence(run):
    with pytest.raises(UnusableInput, match=r"^there is no window 3: .*run has 2\.$"):
        analyze(str(run), Options(window=3, **OPTIONS))
    with pytest.raises(UnusableInput, match="there is no window 1: `ddpdoctor capture RUN` opens"):
        analyze(str(FIXTURE), Options(window=1, **OPTIONS))
