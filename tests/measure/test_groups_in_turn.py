"""Ranks that meet within their host before they meet all: who is late makes its neighbours late for the others, and is alone at it."""

from __future__ import annotations

import gzip
import json
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
UNNAMED = replace(TWICE, kernel_metadata=False, operator_metadata=False)
"""As recorded by older versions of torch: only the streams tell the groups apart."""
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
@pytest.mark.parametrize("config", [TWICE, UNNAMED], ids=["named", "unnamed"])
def test_only_the_late_rank_is_named_and_at_its_whole_price(plant, config, tmp_path):
    truth = generate(replace(config, plants=(plant,)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    mean_ms = truth.mean_step_us / 1e3
    assert accused(measurement) == {CAUSE[plant.kind]: list(plant.ranks)}
    total = found(measurement.facts.late)["total"]
    assert total.ms_per_step == pytest.approx(truth.plants[0].cost_us_per_step / 1e3, abs=TOLERANCE * mean_ms)


@pytest.mark.parametrize("waiting", [3, 4])
def test_a_companion_whose_event_is_missing_is_not_late_itself(waiting, tmp_path):
    """Profilers lose events under load. Without the companion's part of the collective within the host, what it waited there looked like
    its own lateness for the collective of all."""
    config = replace(TWICE, hosts=(3, 3), plants=(Plant("slow_forward", ranks=(5,), ms=3.0),))
    truth = generate(config, tmp_path / "traces")
    for file in sorted((tmp_path / "traces").iterdir()):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        if trace["distributedInfo"]["rank"] == waiting:
            groups = [e for e in trace["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"]]
            within = [e for e in groups if e["args"]["Group size"] == 3]
            # The last in each backward pass, in which it waits for the late rank.
            lost = within[len(config.bucket_bytes) - 1 :: len(config.bucket_bytes)]
            trace["traceEvents"] = [e for e in trace["traceEvents"] if e not in lost]
            file.write_bytes(gzip.compress(json.dumps(trace).encode()))
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"compute": [5]}
    late_ns, _ = lateness(measurement.graphs.primary)
    assert np.delete(late_ns, 5).max() < 0.2 * late_ns[5]
    cost = found(measurement.facts.late)["compute"].ms_per_step
    assert cost == pytest.approx(
        truth.plants[0].cost_us_per_step / 1e3, abs=TOLERANCE * truth.mean_step_us / 1e3
    )


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
    """What it waited within its host is not its own lateness for the others; and the late rank's is counted once, not at each bucket."""
    generate(replace(TWICE, plants=(Plant("slow_data", ranks=(1,), ms=3.0),)), tmp_path / "traces")
    late_ns, _ = lateness(measured(tmp_path / "traces").graphs.primary)
    assert late_ns[1] == pytest.approx(3e6, rel=0.2)
    assert np.delete(late_ns, 1).max() < 0.2 * late_ns[1]
