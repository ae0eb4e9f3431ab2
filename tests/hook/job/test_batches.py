"""The sizes of batches and of a model's inputs, whatever classes the job has for them."""

from __future__ import annotations

from collections import namedtuple

import pytest

torch = pytest.importorskip("torch")

from ddpdoctor.hook.job import batch_size, input_elements  # noqa: E402

Described = namedtuple("Described", ["image", "shape"])
TENSOR = torch.zeros(3, 2)


class Table:
    """A table whose columns are asked for by name."""

    def keys(self) -> list[str]:
        return ["a"]

    def values(self, column: str) -> list[int]:
        return [1]


class Shapeless(dict):
    @property
    def shape(self) -> object:
        raise RuntimeError("this batch has no shape")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (TENSOR, 3),
        ({"image": [TENSOR, TENSOR]}, 3),
        (["a", "b"], 2),
        (torch.tensor(1.0), None),
        ([], None),
        (Described(TENSOR, torch.zeros(1)), 3),
        (Shapeless(image=TENSOR), 3),
        (Table(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_of_an_unknown_class_has_no_size_and_is_no_error(batch, size) -> None:
    assert batch_size(batch) == size


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert batch_size(nested) is None and batch_size((TENSOR, nested)) == 3
    assert input_elements((nested,)) == 5


def test_inputs_of_an_unknown_class_have_no_number_of_elements_and_are_no_error() -> None:
    assert input_elements((TENSOR, {"more": TENSOR})) == 12
    assert input_elements((TENSOR, Table())) is None
