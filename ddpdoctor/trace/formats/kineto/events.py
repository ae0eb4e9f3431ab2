"""The shape of a trace event as msgspec decodes it: only the fields that become columns, all else is skipped.

``Any`` stands where profilers have disagreed about the type (pid and tid are numbers or text, "stream" may be "0x0"): a
wrong type then costs one value, not the event. Names of fields: Kineto's ``output_json.cpp``, ``ParamCommsUtils.hpp``.
"""

from __future__ import annotations

from typing import Any

import msgspec

NOTHING = msgspec.Raw(b"")


class Arguments(msgspec.Struct, gc=False):
    """The "args" object of an event."""

    external_id: Any = msgspec.field(default=-1, name="External id")
    correlation: Any = -1
    device: Any = -1
    stream: Any = -1
    bytes: Any = -1
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    operation: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_size: Any = msgspec.field(default=None, name="Group size")
    sequence: Any = msgspec.field(default=None, name="Seq")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    name: Any = None
    old_external_id: Any = msgspec.field(default=-1, name="external id")
    old_dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input dims")


class Event(msgspec.Struct, gc=False):
    """One element of "traceEvents"; ``ts`` and ``dur`` in µs."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = 0
    args: Arguments | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """The same with ``ts`` as text, for files whose µs since 1970 do not fit a double to the nanosecond."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: Any = 0
    args: Arguments | None = None


NO_ARGUMENTS = Arguments()

EVENTS = msgspec.json.Decoder(list[Event])
EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])
