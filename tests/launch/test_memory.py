"""Memory of real jobs on Gloo: leaks are told with their rank and slope, what only looks like one is not."""

from __future__ import annotations

import sys

import pytest

from ddpdoctor.analysis import Options, analyze
from tests.hook.recording import torchrun

from .launched import run_under

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
MB = 1 << 20
FAMILY = ("memory/growing", "memory/workers-growing", "memory/imbalance")


def diagnosed(tmp_path, *options: str):
    command = torchrun("memory_use.py", *options)
    recorded = run_under(tmp_path, command, "--no-profile", "--telemetry-interval", "0.5")
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert [recorded.info(rank)["hook"]["errors"] for rank in (0, 1)] == [[], []]
    found = analyze(str(recorded.run), Options(cache=False))
    return found, {each.rule: each for each in found.findings if each.rule in FAMILY}


def test_a_rank_that_keeps_tensors_and_workers_that_keep_items(tmp_path):
    found, rules = diagnosed(tmp_path, "--leak", "2", "--worker-leak", "3", "--slows")
    assert set(rules) <= {"memory/growing", "memory/workers-growing", "memory/imbalance"}
    rank, workers = rules["memory/growing"], rules["memory/workers-growing"]
    assert rank.ranks == [1] and workers.ranks == [0]
    if "memory/imbalance" in rules:
        assert rules["memory/imbalance"].caused_by in FAMILY
    growth = found.facts["memory"]["process"]
    assert growth["bytes_per_step"] == pytest.approx(2 * MB, rel=0.15)
    assert growth["low_bytes_per_hour"] <= growth["bytes_per_hour"] <= growth["high_bytes_per_hour"]
    kept = found.facts["memory"]["workers"]
    assert kept["bytes_per_step"] == pytest.approx(3 * MB, rel=0.15)
    assert not growth["may_be_cache"], "the data set lies in the workers"
    assert rank.severity == "warning" and not found.healthy
    # A cache of a data set of which one pass is not over looks the same: it would take 300 GB.
    assert kept["may_be_cache"] and kept["bounded_bytes"] == pytest.approx(3 * MB * 99_500, rel=0.15)
    assert workers.severity == ("info" if kept["bound_fits"] else "warning")
    memory = {each.rank: each.memory for each in found.ranks}
    assert memory[1].process_bytes > memory[0].process_bytes + 200 * MB
    assert memory[0].workers_bytes > 200 * MB
    assert memory[0].grows_bytes_per_hour is None
    assert 0 < found.facts["memory"]["headroom_share"] < 1


def test_what_fills_once_comes_and_goes_or_is_bounded_is_no_leak(tmp_path):
    found, rules = diagnosed(tmp_path, "--healthy")
    assert found.facts["memory"]["watched_hours"] is not None
    assert rules == {}


@pytest.mark.slow
def test_a_rank_that_holds_much_more(tmp_path):
    found, rules = diagnosed(tmp_path, "--hold", "800", "--seconds", "26")
    assert set(rules) == {"memory/imbalance"} and rules["memory/imbalance"].ranks == [1]
    assert found.facts["memory"]["most_bytes"] - found.facts["memory"]["typical_bytes"] == pytest.approx(
        800 * MB, rel=0.1
    )
    assert rules["memory/imbalance"].severity == "info"
