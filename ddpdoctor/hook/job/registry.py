"""Registry of the job's models, loaders and optimizers: their numbers, batch and input sizes, and where they were constructed."""

from __future__ import annotations

import sys
import weakref
from collections import UserDict
from types import CodeType, FrameType
from typing import Any, Callable, Generic, Optional, TypeVar

from ..patching import is_from_job_handler, nested_codes
from .source_lines import HIDDEN, USER, CodeKinds, Lines, Place

MOST_LISTED = 256
"""Upper limit of the objects of one kind described in rank.json, some 400 bytes each. The first ones are described, the rest
counted."""

Value = TypeVar("Value")
Listed = tuple["weakref.ref[Any]", Optional[int]]
"""An object, held weakly, and the number of its source line."""


class WeakMap(Generic[Value]):
    """A map from objects, held weakly, to values."""

    def __init__(self, on_freed: Callable[[Value], None] = lambda value: None) -> None:
        """``on_freed`` is called with the value of each freed object, on any thread."""
        self._known: dict[int, tuple[Any, Value]] = {}
        self._on_freed = on_freed

    def find(self, thing: Any) -> Value | None:
        """The value of ``thing``; None if it has none."""
        known = self._known.get(id(thing))
        return known[1] if known is not None and known[0]() is thing else None

    def hold(self, thing: Any, value: Value) -> weakref.ref[Any]:
        """Set the value of ``thing``."""
        key = id(thing)

        def forget(reference: weakref.ref[Any]) -> None:
            try:
                known = self._known.get(key)
                # The id may have been reused for another object.
                if known is not None and known[0] is reference:
                    del self._known[key]
                    self._on_freed(known[1])
            except Exception:
                pass  # Python would print it to the job's stderr

        reference = weakref.ref(thing, forget)
        self._known[key] = reference, value
        return reference


class NumberedWeakMap(WeakMap[Value]):
    """Objects of one kind, numbered in the order in which they were first seen, with a value for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        """Number of objects so far, which is the next number."""
        self.listed: list[Listed] = []
        """The first ``MOST_LISTED`` objects, by number."""

    def add(self, thing: Any, line: int | None, value: Value) -> None:
        """Give ``thing`` the next number."""
        reference = self.hold(thing, value)
        if self.count < MOST_LISTED:
            self.listed.append((reference, line))
        self.count += 1


_DEEPEST_BATCH = 4
"""Levels of nesting that are searched for a tensor, the tensor included. A dictionary of lists of pairs of tensors has 4."""


def batch_size(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch; the length of a plain list of numbers or strings; None if there is none,
    or if the batch's own code raises an exception."""
    return _unless_it_raises(_batch_size, batch)


def _unless_it_raises(read: Callable[[Any], int | None], value: Any) -> int | None:
    """``read(value)``; None if the code of the job's classes raises an exception. One of a signal handler of the job is passed on."""
    try:
        return read(value)
    except Exception as error:
        if is_from_job_handler(error):
            raise
        return None


def _batch_size(batch: Any) -> int | None:
    for _ in range(_DEEPEST_BATCH):
        if isinstance(batch, (list, tuple)):
            if not batch:
                return None
            if isinstance(batch[0], (int, float, str, bytes)):
                return len(batch)
            batch = batch[0]
            continue
        shape = None if isinstance(batch, dict) else getattr(batch, "shape", None)
        if isinstance(shape, tuple):
            return int(shape[0]) if shape else None
        if not (hasattr(batch, "values") and hasattr(batch, "keys")):
            return None
        values = batch.values() if callable(batch.values) else ()
        batch = next(iter(values), None)
    return None


def input_elements(values: Any) -> int | None:
    """Number of elements of all tensors in the arguments, including those in lists and dictionaries; None if their own code raises an
    exception."""
    return _unless_it_raises(_elements, values)


def _elements(values: Any, nested: int = 2) -> int:
    total = 0
    for value in values:
        if hasattr(value, "numel"):
            total += int(value.numel())
        elif nested and type(value) in (list, tuple):
            total += _elements(value, nested - 1)
        elif nested and hasattr(value, "values") and hasattr(value, "keys") and callable(value.values):
            total += _elements(value.values(), nested - 1)
    return total


_MOST_VISITS = 2048
"""Entries of a batch that are searched for tensors."""
_MOST_BATCH_BYTES = 1 << 48


def tensor_bytes(batch: Any) -> int | None:
    """Bytes of the memory behind the tensors in a batch, including those in nested lists, tuples and dictionaries; None if there are none,
    or if the batch has more entries, or other kinds of values, than are searched. Calls no code of the job: neither methods of its classes
    nor ``__torch_function__``."""
    torch, total, waiting, visits = sys.modules["torch"], 0, [batch], 0
    while waiting:
        value = waiting.pop()
        visits += 1
        entries = _entries(value)
        if type(value) is torch.Tensor and value.layout is torch.strided:
            total += value.untyped_storage().nbytes()
        elif entries is None or visits + len(waiting) + len(entries) > _MOST_VISITS:
            return None
        else:
            waiting.extend(entries)
    return total if 0 < total < _MOST_BATCH_BYTES else None


def _entries(value: Any) -> Any:
    """The entries of a dictionary, list or tuple; () of a value without tensors; None if unknown."""
    kind = type(value)
    if issubclass(kind, UserDict):  # such as Transformers' BatchEncoding
        value = object.__getattribute__(value, "__dict__").get("data")
        kind = type(value)
    if issubclass(kind, dict):
        return dict.values(value)
    for base in (list, tuple):
        if issubclass(kind, base):
            return value if kind is base else base(base.__iter__(value))
    return () if kind in _PLAIN else None


_PLAIN = (int, float, bool, str, bytes, type(None))
"""Types of values that have no tensors."""


_WORKER_INFO = "get_worker_info"


def uses_worker_info(data: Any) -> bool:
    """Whether the code of an iterable dataset, or of an object it wraps, refers to ``get_worker_info``. The code is read, not run:
    that of the classes, and of the functions of their modules that it calls."""
    held = vars(data).values() if hasattr(data, "__dict__") else ()
    return any(
        _class_uses_worker_info(owner) for kind in {type(data), *map(type, held)} for owner in kind.__mro__
    )


def _class_uses_worker_info(owner: type) -> bool:
    if owner.__module__.partition(".")[0] in ("builtins", "torch"):
        return False
    module_names: dict[str, Any] = vars(sys.modules.get(owner.__module__, object))  # type: ignore[assignment]
    for member in vars(owner).values():
        own = _code_of(member)
        for code in () if own is None else nested_codes(own):
            called = [_code_of(module_names.get(name)) for name in code.co_names]
            if any(_WORKER_INFO in each.co_names for each in (code, *called) if each is not None):
                return True
    return False


def _code_of(function: Any) -> Any:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if type(code) is CodeType else None


_Place = tuple[CodeType, int, tuple[Place, ...]]
"""A line that constructs an object, and the lines of well-known packages between it and the constructor."""
_loader_places: dict[int, dict[tuple[int, int], list[_Place]]] = {}
"""Per dataset id (its loaders keep the dataset alive) and place (id of the code, line): the place, once for each living loader
constructed there."""
_code_kinds: list[CodeKinds] = []
"""One instance, created when first needed, because reading the interpreter's folders takes time."""


def record_construction(thing: Any, dataset: Any, frame: FrameType | None) -> None:
    """Record where ``thing`` is constructed, from the stack that ends in ``frame``. ``dataset`` is None if it is not a loader."""
    if _constructions.find(thing) is not None:
        return
    if not _code_kinds:
        _code_kinds.append(CodeKinds())
    # The user's innermost line, also if it is in a subclass's own constructor.
    user_frame = _code_kinds[0].user_frame(frame)
    if user_frame is None:
        return
    place = None
    if dataset is not None and _constructing_kind(frame) != _code_kinds[0].of(user_frame.f_code):
        place = _original_loader_place(dataset)
    place = place or (user_frame.f_code, user_frame.f_lineno, _code_kinds[0].through(frame, user_frame))
    _constructions.hold(thing, (place, id(dataset)))
    if dataset is not None:
        _loader_places.setdefault(id(dataset), {}).setdefault(_key_of(place), []).append(place)


def _key_of(place: _Place) -> tuple[int, int]:
    # Hashing a code object hashes its constants.
    return id(place[0]), place[1]


def _forget_loader(built: tuple[_Place, int]) -> None:
    place, dataset = built
    places = _loader_places.get(dataset, {})
    alive = places.get(_key_of(place), [])
    if alive:
        alive.pop()
    if not alive:
        places.pop(_key_of(place), None)
    if not places:
        _loader_places.pop(dataset, None)


_constructions: WeakMap[tuple[_Place, int]] = WeakMap(_forget_loader)
"""For models and loaders: where each was constructed, and the id of the loader's dataset."""


def _constructing_kind(frame: FrameType | None) -> int:
    """The kind of code that constructs the object. Constructors of installed packages are skipped in favour of their callers."""
    caller = frame
    while caller is not None:
        kind = _code_kinds[0].of(caller.f_code)
        if kind == USER or (kind != HIDDEN and caller.f_code.co_name != "__init__"):
            return kind
        caller = caller.f_back
    return HIDDEN


def _original_loader_place(dataset: Any) -> _Place | None:
    """Where the original loader of ``dataset`` was constructed, if a framework has replaced it.

    accelerate's ``prepare`` and Lightning's ``fit`` do that. The user's arguments are at the original's constructor call. Returns
    None unless the loaders of this dataset were constructed at exactly one place.
    """
    places = _loader_places.get(id(dataset), {})
    return next(iter(places.values()))[0] if len(places) == 1 else None


def line_of(thing: Any, lines: Lines) -> int | None:
    """The number of the line that constructed ``thing``; None if unknown."""
    known = _constructions.find(thing)
    if known is None:
        return None
    code, line, through = known[0]
    return lines.id_of(code, line, through=through)
