"""Arguments of loaders, where a job has several of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from ddpdoctor.hook.patching import Patches  # noqa: E402
from ddpdoctor.hook.trial import constructors  # noqa: E402
from ddpdoctor.hook.trial.request import Trial  # noqa: E402


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.fixture
def trying() -> Iterator[object]:
    """Starts a trial; constructors are as they were afterwards."""
    made = Patches()

    def start(**settings: object) -> Trial:
        trial = Trial({f"loader.{name}": value for name, value in settings.items()}, 12)
        constructors.install(trial, made)
        return trial

    yield start
    made.suspend()


@pytest.mark.parametrize("workers", [(1, 0), (0, 1), (0, 1, 0)], ids=str)
def test_a_loader_without_workers_does_not_refuse_what_another_takes(trying, workers):
    trial = trying(persistent_workers=True, prefetch_factor=4)
    loaders = [DataLoader(range(8), num_workers=each) for each in workers]
    assert [each.persistent_workers for each in loaders] == [each > 0 for each in workers]
    for name, was in (("persistent_workers", False), ("prefetch_factor", None)):
        change = trial.changes[f"loader.{name}"]
        assert (change["state"], change["was"]) == ("applied", was)
        assert "why" not in change


def test_where_no_loader_has_workers_it_is_refused(trying):
    trial = trying(persistent_workers=True)
    for _ in range(2):
        DataLoader(range(8))
    change = trial.changes["loader.persistent_workers"]
    assert (change["state"], change["why"]) == ("refused", "the loader has no workers")


@pytest.mark.parametrize("first", [True, False])
def test_one_loader_that_must_not_have_workers_refuses_them_for_all(trying, first):
    trial = trying(num_workers=2)
    for data in (Stream(), range(8)) if first else (range(8), Stream()):
        DataLoader(data)
    change = trial.changes["loader.num_workers"]
    assert change["state"] == "refused"
    assert "Stream is iterable" in change["why"]
