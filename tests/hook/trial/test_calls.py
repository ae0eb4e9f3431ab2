"""Loaders that repeat their batches, as long as they know how many they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from ddpdoctor.hook.patching import Patches  # noqa: E402
from ddpdoctor.hook.trial import calls  # noqa: E402
from ddpdoctor.hook.trial.request import Trial  # noqa: E402

BATCHES = 20


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(BATCHES))


@pytest.fixture
def instant() -> Iterator[Trial]:
    """A trial with instant loaders, which are as they were afterwards."""
    made, trial = Patches(), Trial({"loader.instant": True}, 100)
    calls.install(trial, made)
    yield trial
    made.suspend()


def passes(loader: DataLoader) -> list[int]:
    """Numbers of batches of three passes."""
    return [sum(1 for _ in loader) for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_pass_has_as_many_batches_as_before(instant, workers) -> None:
    """With persistent workers, all passes have the same iterator."""
    data = TensorDataset(torch.arange(BATCHES))
    assert passes(DataLoader(data, num_workers=workers, persistent_workers=bool(workers))) == [BATCHES] * 3
    assert instant.changes["loader.instant"]["state"] == "applied"


def test_a_stream_is_left_as_it_is_and_ends(instant) -> None:
    assert passes(DataLoader(Stream())) == [BATCHES] * 3
    change = instant.changes["loader.instant"]
    assert change["state"] == "refused" and "number of batches" in change["why"]
