"""Ranks that meet within their host before they meet all: who is late makes its neighbours late for the others, and is alone at it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddpdoctor.measure.metrics import lateness
from ddpdoctor.measure.replay import replay_all
from tests.generator import SMALL, Config, Plant, generate
from tests.measure.traced import accused, found, measured

TOLERANCE = 0.03
"""Of the step."""
TWICE = Config(**SMALL, world_size=6, hosts=(2, 2, 2), within_hosts_first=True)
CAUSE = {"slow_data": "data", "slow_backward_kernels": "compute", "slow_forward": "compute"}


@pytest.mark.parametrize(
    "plant",
    [
        Plant("slow_data", ranks=(1,), ms=3.0),
        Plant("slow_forward", ranks=(2,), ms=3.0),
        Plant("slow_backward_kernels", ranks=(5,), ms=4.0),
    ],
    ids=lambda plant: plant.kind,
)
def test_only_the_late_rank_is_named_and_at_its_whole_price(plant, tmp_path):
    truth = generate(replace(TWICE, plants=(plant,)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    mean_ms = truth.mean_step_us / 1e3
    assert accused(measurement) == {CAUSE[plant.kind]: list(plant.ranks)}
    total = found(measurement.facts.late)["total"]
    assert total.ms_per_step == pytest.approx(truth.plants[0].cost_us_per_step / 1e3, abs=TOLERANCE * mean_ms)


def test_healthy_hosts_are_not_accused(tmp_path):
    generate(TWICE, tmp_path / "traces")
    assert accused(measured(tmp_path / "traces")) == {}


def test_the_replay_of_what_was_measured_gives_the_measured_steps(tmp_path):
    """What starts when another group's collective is over does so in the replay, too."""
    generate(replace(TWICE, plants=(Plant("slow_forward", ranks=(2,), ms=3.0),)), tmp_path / "traces")
    graph = measured(tmp_path / "traces").graphs.primary
    durations = np.concatenate([group.duration for group in graph.groups])
    assert replay_all(graph) == pytest.approx(durations, rel=1e-3)


def test_no_work_is_negative(tmp_path):
    """A rank is in several collectives at once, and works before none of them for less than no time."""
    generate(replace(TWICE, plants=(Plant("slow_forward", ranks=(2,), ms=3.0),)), tmp_path / "traces")
    graph = measured(tmp_path / "traces").graphs.primary
    assert min(group.work.min() for group in graph.groups) > -1.0


def test_the_neighbour_is_not_late_itself(tmp_path):
    """What it waited within its host is not its own lateness for the others."""
    generate(replace(TWICE, plants=(Plant("slow_data", ranks=(1,), ms=3.0),)), tmp_path / "traces")
    late_ns, _ = lateness(measured(tmp_path / "traces").graphs.primary)
    assert late_ns.argmax() == 1
    assert np.delete(late_ns, 1).max() < 0.2 * late_ns[1]
