"""Reads pickles of plain values without Python's unpickler: they can import no class, call nothing and use bounded memory.

torch's flight recorder writes dicts, lists, tuples, strings, integers, booleans and None. Only the opcodes for these are read; any other
content is refused with the reason.
"""

from __future__ import annotations

import struct
from typing import Any

MOST_BYTES = 64 << 20
"""Largest dump; one of 20,000 collectives with their stacks has half of this size."""
MOST_CONTAINERS = 2 << 20
"""Most lists, tuples and dicts of a dump, pickled or in JSON. An empty one takes one byte in a file and sixty in memory."""
_MOST_VALUES = 20_000_000
"""Most opcodes, and most values of the result; shared values are counted at each reference."""
_CHARACTERS_PER_VALUE = 256
"""Characters of a string that count as one value."""

_MARK = object()
_REFUSED_OPCODES = {
    **dict.fromkeys((0x63, 0x93, 0x69), "it names a class or a function"),
    **dict.fromkeys((0x52, 0x81, 0x92, 0x62, 0x6F), "it asks for a call"),
    **dict.fromkeys((0x50, 0x51), "it refers to something outside the file"),
    **dict.fromkeys((0x82, 0x83, 0x84), "it uses an extension"),
}
"""Opcodes with which a pickle could run code → reason for the refusal."""
_LONGEST_KEY = 1024
"""Most characters of a key. Keys must be strings, as in torch's dumps: string hashes are randomised, while integers can be chosen so
that all collide in a dict."""
_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_MOST_DIGITS_BYTES = 8
"""Longest integer, in bytes."""
_CONTAINERS = (list, tuple, dict)
_TOO_MANY_VALUES = "it holds more values than any flight recorder keeps"
_BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT, _MEMOIZE = 0x68, 0x6A, 0x71, 0x72, 0x94
_LENGTHS = {0x58: struct.Struct("<I"), 0x8C: struct.Struct("<B"), 0x8D: struct.Struct("<Q")}
"""Opcode of a string → format of its length."""
_NUMBERS = {
    0x4A: struct.Struct("<i"),
    0x4B: struct.Struct("<B"),
    0x4D: struct.Struct("<H"),
    0x47: struct.Struct(">d"),
}
"""Opcodes of numbers of a fixed size; ``_LONG1`` has a length."""
_LONG1 = 0x8A
_EMPTY_DICT, _EMPTY_LIST, _EMPTY_TUPLE, _POP_MARK = 0x7D, 0x5D, 0x29, 0x28
_APPENDS, _APPEND, _SETITEMS, _SETITEM, _TUPLE = 0x65, 0x61, 0x75, 0x73, 0x74
_TUPLE_CODES = frozenset((*_TUPLES, _TUPLE))
_STOP, _PROTO, _FRAME = 0x2E, 0x80, 0x95
_WORD = struct.Struct("<I").unpack_from


class NotPlainError(ValueError):
    """The file is not a pickle of plain values. The message gives the reason as part of a sentence."""


def read_plain(data: bytes) -> Any:
    """The value pickled in ``data``. Raises :class:`NotPlainError`."""
    if len(data) > MOST_BYTES:
        raise NotPlainError(f"it is larger than {MOST_BYTES >> 20} MiB")
    try:
        value, is_shared = _value(data)
        if is_shared:
            _check_weight(value)
        return value
    except (IndexError, struct.error):
        raise NotPlainError("it is cut off") from None
    except (TypeError, AttributeError, KeyError, UnicodeDecodeError):
        raise NotPlainError("it is damaged") from None


def _value(data: bytes) -> tuple[Any, bool]:  # noqa: C901
    """(value, whether it refers to a container more than once). One pass over the opcodes, the most frequent ones first: a dump has
    hundreds of thousands."""
    stack: list[Any] = []
    memo = _Memo()
    containers = at = 0
    for _ in range(_MOST_VALUES):
        code = data[at]
        at += 1
        if code == _BINGET:
            stack.append(memo.reference(data[at]))
            at += 1
        elif code == _POP_MARK:
            stack.append(_MARK)
        elif code == _BINPUT:
            memo[data[at]] = stack[-1]
            at += 1
        elif code in _LENGTHS:
            text, at = _text(data, _LENGTHS[code], at)
            stack.append(text)
        elif code == _EMPTY_LIST:
            containers += 1
            stack.append([])
        elif code == _APPENDS:
            values = _since_mark(stack)
            list.extend(stack[-1], values)
        elif code == _LONG_BINGET:
            stack.append(memo.reference(_WORD(data, at)[0]))
            at += 4
        elif code == _LONG_BINPUT:
            memo[_WORD(data, at)[0]] = stack[-1]
            at += 4
        elif code == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == _EMPTY_DICT:
            containers += 1
            stack.append({})
        elif code == _SETITEMS:
            values = _since_mark(stack)
            _check_keys(values[::2])
            dict.update(stack[-1], zip(values[::2], values[1::2], strict=False))
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == _STOP:
            return stack.pop(), memo.is_shared
        elif code == _PROTO:
            at += 1
        elif code == _FRAME:
            at += 8
        elif code in _NUMBERS:
            stack.append(_NUMBERS[code].unpack_from(data, at)[0])
            at += _NUMBERS[code].size
        elif code == _LONG1:
            number, at = _long_number(data, at)
            stack.append(number)
        else:
            containers += code in _TUPLE_CODES
            _execute_rare_opcode(stack, code)
        if containers > MOST_CONTAINERS:
            break
    raise NotPlainError(_TOO_MANY_VALUES)


class _Memo(dict[int, Any]):
    """Values that the file defines once and refers to by number."""

    is_shared = False
    """Whether a container was referred to. Only then can the value be larger than the file, or contain itself."""
    characters = 0
    """Characters of strings, counted at each reference."""

    def reference(self, number: int) -> Any:
        value = self[number]
        if type(value) is str:
            self.characters += len(value)
            if self.characters > _CHARACTERS_PER_VALUE * _MOST_VALUES:
                raise NotPlainError(_TOO_MANY_VALUES)
        elif isinstance(value, _CONTAINERS):
            self.is_shared = True
        return value


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if type(key) is not str or len(key) > _LONGEST_KEY:
            raise NotPlainError("what stands for a key in it is no text of at most a thousand letters")


def _check_weight(value: Any) -> None:
    """Checks that a value does not contain itself and is not too large because of shared parts. Raises :class:`NotPlainError`."""
    weights: dict[int, int] = {}
    todo: list[Any] = [value]
    while todo:
        each = todo[-1]
        found = weights.get(id(each))
        if found is not None:
            todo.pop()
            if found == 0:
                weights[id(each)] = _weight(each, weights)
            continue
        if isinstance(each, dict):
            parts = [part for part in each.values() if part and isinstance(part, _CONTAINERS)]
        elif isinstance(each, list | tuple):
            parts = [part for part in each if part and isinstance(part, _CONTAINERS)]
        else:
            return
        weights[id(each)] = 0
        if any(weights.get(id(part)) == 0 for part in parts):
            raise NotPlainError("it refers to itself")
        todo += {id(part): part for part in parts if id(part) not in weights}.values()


def _weight(container: Any, weights: dict[int, int]) -> int:
    weight = 1
    parts = (*container, *container.values()) if isinstance(container, dict) else container
    for part in parts:
        if isinstance(part, str):
            weight += 1 + len(part) // _CHARACTERS_PER_VALUE
        else:
            weight += weights.get(id(part), 1)
    if weight > _MOST_VALUES:
        raise NotPlainError(_TOO_MANY_VALUES)
    return weight


def _text(data: bytes, length: struct.Struct, at: int) -> tuple[str, int]:
    """(string with its length at ``at``, position after it)."""
    begin = at + length.size
    end = begin + length.unpack_from(data, at)[0]
    if end > len(data):
        raise IndexError
    return data[begin:end].decode(), end


def _long_number(data: bytes, at: int) -> tuple[int, int]:
    """(integer with its length at ``at``, position after it)."""
    length = data[at]
    end = at + 1 + length
    if length > _MOST_DIGITS_BYTES:
        raise NotPlainError("it holds a number of more than 64 bits")
    if end > len(data):
        raise IndexError
    return int.from_bytes(data[at + 1 : end], "little", signed=True), end


def _execute_rare_opcode(stack: list[Any], code: int) -> None:
    """Executes the less frequent opcodes."""
    if code in _TUPLES:
        many = _TUPLES[code]
        if len(stack) < many:
            raise IndexError
        stack[-many:] = [tuple(stack[-many:])]
    elif code == _EMPTY_TUPLE:
        stack.append(())
    elif code == _TUPLE:
        stack.append(tuple(_since_mark(stack)))
    elif code == _APPEND:
        value = stack.pop()
        list.append(stack[-1], value)
    elif code == _SETITEM:
        value, key = stack.pop(), stack.pop()
        _check_keys([key])
        dict.__setitem__(stack[-1], key, value)
    else:
        raise NotPlainError(_REFUSED_OPCODES.get(code, "it holds more than plain values"))


def _since_mark(stack: list[Any]) -> list[Any]:
    """Removes the last mark and the values after it from the stack, and returns the values."""
    place = len(stack) - 1
    while stack[place] is not _MARK:
        place -= 1
        if place < 0:
            raise IndexError
    values = stack[place + 1 :]
    del stack[place:]
    return values
