"""Work that differs between the ranks of a device job at random: the whole price, and nobody accused."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.graph import Graph, Sync
from ddpdoctor.measure.taxonomy import SyncKind
from tests.generator import Config, Plant, When, generate
from tests.measure.made import cycles_of, graph_of, late_of, reductions, simple, work_array


def on_devices(graph: Graph) -> Graph:
    """The same graph with its collectives on devices."""
    return replace(graph, groups=[replace(group, on_device=True) for group in graph.groups])


def sized(graph: Graph, elements) -> Graph:
    """With inputs of these sizes [cycles, R]."""
    steps = [replace(of, elements=np.asarray(elements, float)[:, r]) for r, of in enumerate(graph.steps)]
    return replace(graph, steps=steps)


def drawn(world, cycles, sigma, seed=0):
    """[cycles, 1, R] factors of the work."""
    return np.random.default_rng(seed).lognormal(0.0, sigma, (cycles, 1, world))


def waited(work):
    """Mean over the cycles of what the slowest of the ranks has beyond the mean, from [cycles, 1, R]."""
    return float((work.max(axis=2) - work.mean(axis=2)).mean())


@pytest.mark.parametrize(("world", "cycles"), [(2, 19), (4, 7), (8, 7), (8, 19), (16, 7)])
@pytest.mark.parametrize("sigma", [0.2, 0.28])
def test_the_whole_price_and_nobody_accused(world, cycles, sigma):
    long = 15.0 * drawn(world, cycles, sigma)
    late = late_of(on_devices(simple(world, cycles, forward=long / 3, backward=long * 2 / 3)))
    assert set(late) == {"turns", "total"}
    cost = late["turns"]
    assert cost.ranks is None and cost.kinds == ["compute"] and not cost.stands_out_in
    assert cost.ms_per_step == pytest.approx(waited(long), rel=0.15)


def test_on_cpus_it_may_be_the_machine():
    long = 15.0 * drawn(4, 40, 0.28)
    assert late_of(simple(4, 40, forward=long / 3, backward=long * 2 / 3)) == {}


@pytest.mark.parametrize("jitter", [0.03, 0.05])
@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_jitter_is_none(world, jitter):
    for seed in range(5):
        assert not attribute(on_devices(simple(world, 7, jitter=jitter, seed=seed))).turns_causes


def test_inputs_that_explain_it_rule_out_the_jitter():
    long = drawn(8, 7, 0.06)
    graph = on_devices(simple(8, 7, forward=5 * long, backward=10 * long))
    assert attribute(graph).inputs_explain is None and not attribute(graph).turns_causes
    found = attribute(sized(graph, 1e9 * long[:, 0]))
    assert found.turns_causes == ("compute",) and found.inputs_explain == pytest.approx(1.0, abs=0.01)
    others = attribute(sized(graph, 1e9 * drawn(8, 7, 0.06, seed=1)[:, 0]))
    assert not others.turns_causes


def test_inputs_that_are_even_explain_nothing():
    long = drawn(4, 7, 0.28)
    graph = sized(on_devices(simple(4, 7, forward=5 * long, backward=10 * long)), np.full((7, 4), 1e9))
    assert attribute(graph).inputs_explain == 0.0 and attribute(graph).turns_causes == ("compute",)


def test_a_rank_that_always_has_more_is_accused_itself():
    slow = np.array([1.0, 1.0, 1.4, 1.0])
    found = late_of(on_devices(simple(4, 7, jitter=0.01, forward=5 * slow, backward=10 * slow)))
    assert set(found) == {"compute", "total"} and found["compute"].ranks == [2]


def test_more_than_half_that_always_have_more_are_no_turns():
    slow = np.where(np.arange(8) < 5, 1.4, 1.0)
    assert not attribute(
        on_devices(simple(8, 7, jitter=0.01, forward=5 * slow, backward=10 * slow))
    ).turns_causes


def test_one_long_step_of_all_is_none():
    extra = np.zeros((8, 1, 4))
    extra[0, 0] = (30.0, 36.0, 33.0, 60.0)
    assert not attribute(on_devices(simple(4, 8, jitter=0.01, backward=10.0 + extra))).turns_causes


def test_what_evens_out_within_the_step_counts_where_the_ranks_meet_in_between():
    """An expert of one layer is hot on one rank, of the next layer on another; between them is an all-to-all."""
    between = Sync(SyncKind.MODEL, "all_to_all", (0, 1, 2, 3))
    syncs = [between, *reductions(4)]
    hot = np.stack([np.roll(np.array([9.0, 3.0, 3.0, 3.0]), n) for n in range(7)])
    work = work_array(7, 2, 4, forward=np.stack([hot, 18.0 - 2 * hot + hot], axis=1))
    group = replace(
        cycles_of(syncs, work), on_device=True, dependency_probability=np.array([[True] * 4, [False] * 4])
    )
    late = late_of(graph_of(group))
    assert late["turns"].ms_per_step == pytest.approx((9.0 - 4.5) + (15.0 - 13.5), rel=0.02)
    apart = replace(
        group,
        dependency_probability=np.zeros((2, 4), bool),
        syncs=(replace(between, kind="gradients"), syncs[1]),
    )
    assert "turns" not in late_of(graph_of(apart))


STEPS = 8
FACTORS = (1.0, 1.15, 1.3, 1.6)


def uneven():
    """Each rank gets another of the factors in each step, in no order."""
    deal = np.random.default_rng(3)
    return [
        Plant("uneven_work", ranks=(int(rank),), when=When(first=step, last=step), factor=factor)
        for step in range(STEPS)
        for rank, factor in zip(deal.permutation(4), FACTORS, strict=True)
        if factor > 1.0
    ]


@pytest.mark.extended
def test_the_diagnosis_names_the_inputs(tmp_path):
    generate(Config(steps=STEPS, plants=tuple(uneven())), tmp_path)
    said = analyze(str(tmp_path), Options(cache=False, jobs=1))
    first = said.findings[0]
    assert (said.verdict.rule, first.ranks) == ("rank-imbalance/alternating", None)
    assert "Batches are of uneven size" in said.verdict.headline
    assert "of the differences" in first.explanation and "token" in first.fixes[0].why
