"""Generated traces of the cases on which tools go wrong: the right rank, the right cause, the true cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.generator import SMALL, Config, HostClock, Plant, When, cpu_job, generate
from tests.generator.cases import all_cases, case
from tests.measure.traced import accused, found, measured

TOLERANCE = 0.03
"""Of the step."""
CAUSE = {"slow_data": "data", "host_gap_backward": "host"}

CHOSEN = {
    "A-4-ranks-seed-0-drift",
    "B-4-ranks-seed-0-dropped",
    "B-8-ranks-seed-0-missing",
    "C-4-ranks-seed-0-drift",
    "D-4-ranks-seed-0-no-seq",
    "E-4-ranks-seed-0-no-seq",
    "F-3-ranks-seed-0-5ms-dropped",
    "F-4-ranks-seed-0-200ms-drift",
}


def check(made, folder):
    """Rank, cause and cost of a case against its truth."""
    truth = generate(made.config, folder)
    measurement = measured(folder)
    assert measurement.graphs.primary.refused is None
    late = found(measurement.facts.late)
    mean_ms = truth.mean_step_us / 1e3
    assert measurement.facts.steps.mean_ms == pytest.approx(mean_ms, rel=TOLERANCE)
    assert measurement.facts.communication.clock_error_us < 50
    if made.culprit is None:
        assert accused(measurement) == {}
        return measurement, truth
    (plant,) = truth.plants
    assert accused(measurement) == {CAUSE[plant.kind]: [made.culprit]}
    assert late["total"].ms_per_step == pytest.approx(plant.cost_us_per_step / 1e3, abs=TOLERANCE * mean_ms)
    return measurement, truth


@pytest.mark.parametrize("made", [c for c in all_cases() if c.name in CHOSEN], ids=lambda made: made.name)
def test_cases(made, tmp_path):
    check(made, tmp_path / "traces")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("letter", "ABCDEF")
def test_all_cases(letter, seed, tmp_path):
    for made in all_cases((seed,)):
        if made.name.startswith(letter):
            check(made, tmp_path / made.name)


@pytest.mark.parametrize("letter", "AF")
def test_without_any_metadata(letter, tmp_path):
    """Recordings older than torch 2.3: kernels have names and times only."""
    made = case(letter, 4)
    bare = replace(made.config, kernel_metadata=False, operator_metadata=False, include_seq=False)
    check(replace(made, config=bare), tmp_path / "traces")


@pytest.mark.parametrize("letter", "ABF")
def test_on_cpus(letter, tmp_path):
    """Gloo: ends scatter, and nothing but the calls and the run loop's events is recorded."""
    folder = tmp_path / "traces"
    made = case(letter, 4, backend="gloo")
    truth = generate(made.config, folder)
    measurement = measured(folder)
    if made.culprit is None:
        assert accused(measurement) == {}
    else:
        assert set(accused(measurement)) == {CAUSE[truth.plants[0].kind]}
        assert accused(measurement)[CAUSE[truth.plants[0].kind]] == [made.culprit]
        cost_ms = truth.plants[0].cost_us_per_step / 1e3
        assert measurement.facts.late.total.ms_per_step == pytest.approx(
            cost_ms, abs=TOLERANCE * truth.mean_step_us / 1e3
        )


@pytest.mark.parametrize("letter", "AC")
def test_the_culprit_s_trace_is_missing(letter, tmp_path):
    """Nobody at hand is to blame, and nobody is blamed."""
    made = case(letter, 4, missing="culprit")
    generate(made.config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {}
    assert any("3 of 4 ranks" in note for note in measurement.notes)


TWO_HOSTS = {"hosts": (2, 2), "clocks": (HostClock(), HostClock(-60_000_000_000, 100.0))}
LATE = (Plant("slow_data", ranks=(2,), ms=2.0),)
SHAPES = {
    "a minute apart, 100 ppm": Config(**SMALL, plants=LATE, **TWO_HOSTS),
    "a minute apart, no sequence": Config(**SMALL, plants=LATE, include_seq=False, **TWO_HOSTS),
    "no step marks": Config(**SMALL, plants=LATE, step_annotations=False),
    "late window of a victim": Config(**SMALL, plants=LATE, window_starts_late={1: 7}),
    "late window of the culprit": Config(**SMALL, plants=LATE, window_starts_late={2: 7}, include_seq=False),
    "two steps": Config(**SMALL, plants=LATE, steps=2),
    "accumulation": Config(**SMALL, plants=LATE, accumulation=3, steps=5),
    "metric": Config(**SMALL, plants=LATE, metric_allreduce=True),
    "sixteen ranks": Config(
        **SMALL, plants=(Plant("slow_data", ranks=(11,), ms=2.0),), world_size=16, steps=4
    ),
    "events of all kinds lost": Config(
        **SMALL, plants=LATE, dropped_event_fraction=0.03, dropped_scope="all"
    ),
}


LONG = ("sixteen ranks", "accumulation", "metric", "a minute apart, no sequence")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SHAPES]
)
def test_shapes_of_jobs_and_recordings(name, tmp_path):
    config = SHAPES[name]
    truth = generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert measurement.graphs.primary.refused is None
    assert accused(measurement) == {"data": list(config.plants[0].ranks)}
    total = measurement.facts.late.total
    mean_ms = truth.mean_step_us / 1e3
    assert total.ms_per_step == pytest.approx(truth.plants[0].cost_us_per_step / 1e3, abs=TOLERANCE * mean_ms)


ONE_STEP = Config(**SMALL, plants=(Plant("host_gap_backward", ranks=(2,), ms=6.0),), steps=1)


def test_one_step_alone_names_the_rank(tmp_path):
    """The window is the cycle: what happened before it is not known, who came last is."""
    generate(ONE_STEP, tmp_path / "traces")
    assert {rank for ranks in accused(measured(tmp_path / "traces")).values() for rank in ranks} == {2}


def test_one_step_alone_is_priced_once(tmp_path):
    truth = generate(ONE_STEP, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    cost_ms = truth.plants[0].cost_us_per_step / 1e3
    assert measurement.facts.late.total.ms_per_step == pytest.approx(
        cost_ms, abs=TOLERANCE * truth.mean_step_us / 1e3
    )


@pytest.mark.parametrize("metadata", [True, False])
def test_tensor_and_data_parallel(metadata, tmp_path):
    """No collective is common to all ranks: each belongs to a row or a column of the mesh, without metadata on a stream of its own."""
    kept = {"kernel_metadata": metadata, "operator_metadata": metadata}
    config = Config(**SMALL, tensor_parallel=2, steps=5, plants=LATE, **kept)
    truth = generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"data": [2]}
    assert measurement.facts.late.total.ms_per_step == pytest.approx(
        truth.plants[0].cost_us_per_step / 1e3, abs=TOLERANCE * truth.mean_step_us / 1e3
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow) if seed > 2 else seed for seed in range(8)]
)
def test_lost_events_do_not_lengthen_or_shorten_steps(seed, tmp_path):
    """A reduction whose call or whose end was lost leaves the others theirs, and a step whose mark was lost its neighbours."""
    config = cpu_job(**SMALL, plants=LATE, dropped_event_fraction=0.05, dropped_scope="all", seed=seed)
    truth = generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert measurement.facts.steps.mean_ms == pytest.approx(truth.mean_step_us / 1e3, rel=0.02)


@pytest.mark.parametrize(
    ("when", "kind", "period"),
    [(When(every=3), "periodic", 3), (When(first=4, last=9), "range", None), (When(), "always", None)],
)
def test_when_it_happens(when, kind, period, tmp_path):
    config = Config(**SMALL, steps=14, plants=(Plant("slow_data", ranks=(2,), ms=5.0, when=when),))
    truth = generate(config, tmp_path / "traces")
    cost = measured(tmp_path / "traces").facts.late.data
    assert (cost.ranks, cost.persistence, cost.period_steps) == ([2], kind, period)
    assert cost.ms_per_step == pytest.approx(
        truth.plants[0].cost_us_per_step / 1e3, abs=TOLERANCE * truth.mean_step_us / 1e3
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Plant("slow_data", ranks=(2,), ms=3.0), Plant("slow_backward_kernels", ranks=(1,), ms=2.0)),
        (Plant("host_gap_backward", ranks=(0,), ms=4.0), Plant("slow_data", ranks=(3,), ms=4.0)),
        (Plant("slow_forward", ranks=(3,), ms=4.0), Plant("slow_data", ranks=(3,), ms=2.0)),
    ],
    ids=["one later than the other", "both equally late", "both on one rank"],
)
def test_two_causes_at_once(first, second, tmp_path):
    """Each is named; what it saves alone, and both together, is what the simulation without it saves."""
    truth = generate(Config(plants=(first, second)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    cause = {**CAUSE, "slow_backward_kernels": "compute", "slow_forward": "compute"}
    assert accused(measurement) == {cause[p.kind]: list(p.ranks) for p in (first, second)}
    late, mean_ms = measurement.facts.late, truth.mean_step_us / 1e3
    for plant, told in zip((first, second), truth.plants, strict=True):
        cost = getattr(late, cause[plant.kind])
        alone_ms = told.cost_us_per_step / 1e3
        assert cost.alone_ms_per_step == pytest.approx(max(alone_ms, 0.0), abs=TOLERANCE * mean_ms)
        assert cost.alone_ms_per_step - 0.05 <= cost.ms_per_step <= cost.remaining_ms_per_step + 0.05
        assert cost.steps_seen == 7 and cost.steps_hit == 7
    both_ms = mean_ms - sum(truth.step_us_without_any) / len(truth.step_us) / 1e3
    parts_ms = sum(getattr(late, cause[p.kind]).ms_per_step for p in (first, second))
    assert late.total.ms_per_step == pytest.approx(both_ms, abs=TOLERANCE * mean_ms)
    assert parts_ms == pytest.approx(late.total.ms_per_step, abs=0.05)
