"""Loaders that get other workers in the middle of a loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info  # noqa: E402

from ddpdoctor.hook.patching import Patches  # noqa: E402
from ddpdoctor.hook.trial import blocks  # noqa: E402
from ddpdoctor.hook.trial.request import Trial  # noqa: E402

STEPS = 6


class Items(Dataset):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return index, -1 if info is None else info.num_workers


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter((number, -1) for number in range(200))


@pytest.fixture
def walking() -> Iterator[object]:
    """Starts a trial of blocks of six steps; loaders are as they were afterwards."""
    made = Patches()

    def start(*settings: dict[str, object]) -> Trial:
        trial = Trial({}, STEPS * len(settings), [{"set": each, "steps": STEPS} for each in settings])
        blocks.install(trial, made)
        return trial

    yield start
    made.suspend()


def trained(trial: Trial, loader: DataLoader, epochs: int = 1) -> list[tuple[int, int]]:
    """(First sample, workers that were at it) of each step until the trial is over."""
    seen = []
    for _ in range(epochs):
        for indices, workers in loader:
            seen.append((int(indices[0]), int(workers[0])))
            trial.document["steps"] += 1
            if trial.document["steps"] == trial.steps:
                return seen
    return seen


def workers_of(seen: list[tuple[int, int]]) -> list[set[int]]:
    return [{workers for _, workers in seen[start : start + STEPS]} for start in range(0, len(seen), STEPS)]


def states(trial: Trial) -> list[str]:
    return [each["state"] for each in trial.document["blocks"]]


TWO = {"loader.num_workers": 2, "loader.prefetch_factor": 2, "loader.persistent_workers": True}
ONE = {"loader.num_workers": 1, "loader.prefetch_factor": 4, "loader.persistent_workers": True}


@pytest.mark.parametrize("own", [0, 3])
def test_workers_change_from_block_to_block_and_no_sample_comes_twice(walking, own):
    trial = walking({}, TWO, {}, ONE, {})
    seen = trained(trial, DataLoader(Items(), batch_size=2, num_workers=own))
    as_it_is = own or -1
    assert workers_of(seen) == [{as_it_is}, {2}, {as_it_is}, {1}, {as_it_is}]
    firsts = [first for first, _ in seen]
    assert firsts == sorted(set(firsts))
    assert states(trial) == ["applied"] * 5


@pytest.mark.parametrize("stay", [False, True])
def test_a_loop_that_begins_again_keeps_the_workers_of_its_block(walking, stay):
    trial = walking({}, TWO, {})
    loader = DataLoader(Items(), batch_size=40, num_workers=1, persistent_workers=stay)
    seen = trained(trial, loader, epochs=9)
    assert len(seen) == 3 * STEPS
    assert workers_of(seen) == [{1}, {2}, {1}]
    assert states(trial) == ["applied"] * 3


def test_a_stream_is_refused_and_goes_on(walking):
    trial = walking({}, TWO, {})
    seen = trained(trial, DataLoader(Stream(), batch_size=2))
    assert workers_of(seen) == [{-1}] * 3
    assert states(trial)[0] == "refused"
    assert "Stream is iterable" in trial.document["blocks"][0]["why"]


class OneWorker(DataLoader):
    """A loader of the job that works with one worker only."""

    def _get_iterator(self):
        if self.num_workers != 1:
            raise RuntimeError("this loader has one worker")
        return super()._get_iterator()


def test_a_loader_that_cannot_be_changed_goes_on_as_it_was(walking):
    trial = walking({}, TWO, {})
    loader = OneWorker(Items(), batch_size=40, num_workers=1)
    assert workers_of(trained(trial, loader, epochs=9)) == [{1}] * 3
    assert states(trial)[1] == "refused" and "one worker" in trial.document["blocks"][1]["why"]
    assert loader.num_workers == 1


def test_a_loader_without_workers_has_no_timeout(walking):
    """torch refuses to iterate over one that has."""
    trial = walking({}, {"loader.num_workers": 0}, {})
    loader = DataLoader(Items(), batch_size=40, num_workers=1, timeout=60)
    assert workers_of(trained(trial, loader, epochs=9)) == [{1}, {-1}, {1}]
    assert states(trial) == ["applied"] * 3 and loader.timeout == 60


def test_without_blocks_loaders_are_left_alone(walking):
    begin = DataLoader.__iter__
    patches = Patches()
    blocks.install(Trial({}, 12), patches)
    assert DataLoader.__iter__ is begin
