"""Jobs with planted faults on a real GPU: what is said first of each, and that recording leaves the job as it is."""

from __future__ import annotations

import pytest

from .scenarios import SCENARIOS, run

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
NAMED = [scenario.name for scenario in SCENARIOS if scenario.rules]


@pytest.mark.parametrize("name", NAMED)
def test_the_planted_fault_is_found(tmp_path, name: str) -> None:
    scenario = BY_NAME[name]
    found = run(scenario, tmp_path / name)
    said = [rule for rule, *_ in found["findings"]]
    is_shared = scenario.compares_ranks and torch.cuda.device_count() < scenario.ranks
    expected = {"gpu/shared"} if is_shared else scenario.rules
    assert expected & set(said), (said, (tmp_path / name / "output.txt").read_text())


def test_recording_leaves_the_parameters_as_they_are(tmp_path) -> None:
    bare, recorded = (run(BY_NAME[name], tmp_path / name)["truth"] for name in ("bare-one", "one"))
    assert recorded[0]["losses"] == bare[0]["losses"]
    assert recorded[0]["parameters"] == bare[0]["parameters"]
