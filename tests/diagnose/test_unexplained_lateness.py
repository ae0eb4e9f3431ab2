"""No table of ranks says that a rank is late without a finding that names it, or that says why it is of no account."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.costs import arrival_facts
from ddpdoctor.measure.metrics import rank_breakdown
from ddpdoctor.measure.taxonomy import PARTS, Part
from tests.generator import SMALL, Config, Plant, When, cpu_job, generate
from tests.measure.grids import pairs_first
from tests.measure.made import on, simple
from tests.measure.recorded import Job, plant, record
from tests.net.cases import GROUPS

pytestmark = pytest.mark.extended

RULE = "rank-imbalance/unexplained-lateness"
SUBSTANTIAL = 0.1
"""Of the step; and twice what the others are late."""


def unexplained(diagnosis):
    """Ranks that the table says are late by far, and no finding names."""
    named = {rank for finding in diagnosis.findings for rank in finding.ranks or ()}
    late = {rank.rank: rank.late_ms for rank in diagnosis.ranks if rank.late_ms is not None}
    found = []
    for rank, late_ms in late.items():
        others = [ms for other, ms in late.items() if other != rank]
        if not others or late_ms < SUBSTANTIAL * diagnosis.steps.mean_ms:
            continue
        if late_ms > 2.01 * np.quantile(others, 0.5, method="higher") and rank not in named:
            found.append((rank, late_ms))
    return found


@pytest.mark.parametrize(
    ("kind", "world"),
    pairs_first(("slow_forward", "host_gap_backward", "slow_data", "gc_pause", "throttled"), (2, 3, 4, 8))[
        ::3
    ],
)
def test_generated_traces(kind, world, tmp_path):
    """In few steps of a short window, so that hardly anything stands out of chance."""
    for number, on_cpu in enumerate((False, True)):
        if on_cpu and kind == "throttled":
            continue
        config = {"world_size": world, "steps": 4, "seed": world + number, **SMALL}
        config["plants"] = (Plant(kind, ranks=(1,), ms=4.0, factor=1.4, when=When(probability=0.5)),)
        place = tmp_path / f"job{number}"
        generate(cpu_job(**config) if on_cpu else Config(**config), place)
        assert unexplained(analyze(str(place), Options(cache=False))) == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("slow-data-one-rank", "dataloader/one-rank-late"),
        ("slow-data-one-rank", "dataloader/*"),
        ("rank0-host-work", "rank-imbalance/host-work"),
    ],
)
def test_a_cause_that_is_suppressed_is_not_told_as_none(name, rule):
    """It has a price that is neither small nor rare; only another rank's lateness would be unexplained."""
    fixture = Path(__file__).parents[2] / "fixtures" / name
    assert rule in {"dataloader/*", analyze(str(fixture), Options(cache=False)).findings[0].rule}
    found = analyze(str(fixture), Options(cache=False, suppressed=[rule]))
    assert RULE not in {finding.rule for finding in found.findings}
    assert "on time" not in found.verdict.headline


@pytest.mark.slow
@pytest.mark.parametrize("group", ["traces", "fixtures", "runs"])
def test_recorded_ones(group, tmp_path):
    cases = GROUPS[group]
    if cases.place is not None and not cases.place.exists():
        pytest.skip("not on this machine")
    found = {}
    for number, name in enumerate(cases.names()):
        (tmp_path / str(number)).mkdir()
        try:
            said = analyze(str(cases.make(name, tmp_path / str(number))), Options(cache=False))
        except Exception:  # broken and odd files are others' tests
            continue
        found[name] = unexplained(said)
    assert found and {name: ranks for name, ranks in found.items() if ranks} == {}


def test_it_says_what_being_on_time_would_save():
    """Of 10 ms that a rank is late, 4 ms hide behind another one that is late for them as well."""
    late = simple(4, 20, backward=10.0 + on(2, 4, 10.0, 20))
    facts = arrival_facts(late, {})
    assert facts.late_ranks == [2] and facts.late_ms["2"] == pytest.approx(10.0)
    assert facts.late_steps == {"2": 20} and facts.on_time_saves_ms == pytest.approx(10.0)
    hidden = simple(4, 20, backward=10.0 + on(2, 4, 10.0, 20) + on(3, 4, 4.0, 20))
    assert arrival_facts(hidden, {}).late_ranks == [2]
    assert arrival_facts(hidden, {}).on_time_saves_ms == pytest.approx(6.0)


def test_of_two_ranks_the_other_one_is_the_measure():
    job = simple(2, 20, backward=10.0 + on(1, 2, 10.0, 20))
    facts = arrival_facts(job, {})
    assert facts.late_ms["1"] == pytest.approx(rank_breakdown(job)[0, PARTS.index(Part.COMM_WAIT)] / 1e6)
    assert facts.late_ms["1"] == pytest.approx(10.0) and facts.on_time_saves_ms == pytest.approx(10.0)


def test_ranks_that_are_late_alike_are_not_told():
    now_one_now_another = np.stack([on(n % 4, 4, 6.0)[0] for n in range(20)])
    assert arrival_facts(simple(4, 20, backward=10.0 + now_one_now_another), {}).late_ranks == []
    assert arrival_facts(simple(4, 20, jitter=0.05), {}).late_ranks == []


def test_what_has_a_finding_is_not_told_twice(tmp_path):
    run = record(tmp_path / "run", Job(steps=40, extra=plant(2, backward=8.0)))
    said = analyze(str(run), Options(cache=False))
    assert said.findings[0].ranks == [2] and RULE not in {finding.rule for finding in said.findings}


def test_two_pauses_that_may_be_chance_are_told_as_such(tmp_path):
    job = Job(
        data=0.2,
        steps=20,
        extra=lambda rank, step: {"backward": 40.0} if (rank, step) in {(1, 8), (1, 13)} else {},
    )
    said = analyze(str(record(tmp_path / "run", job)), Options(cache=False))
    told = [finding for finding in said.findings if finding.rule == RULE]
    assert said.healthy and len(told) == 1
    assert told[0].ranks == [1] and told[0].severity == "info" and "in 2 of" in told[0].explanation
