"""``memory.jsonl`` of a rank: torch's counters of its device's memory, as far as they can be what a rank wrote."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir import MEMORY_FILE, MEMORY_SCHEMA, Phase

_MOST_LINES = 100_000
"""The hook writes 600 for each doubling of its interval: fewer in a hundred years."""
_MOST_BYTES = 2**50
"""No device has as much."""
_LEAST_DEVICE_BYTES = 256 << 20
"""A CUDA context alone takes more."""

_PHASES = frozenset(phase.value for phase in Phase)

_Bytes = Annotated[int, Meta(ge=0, le=_MOST_BYTES)]
_Text = Annotated[str, Meta(max_length=64)]


class _Line(msgspec.Struct, frozen=True):
    schema: _Text | None = None
    total_bytes: _Bytes | None = None
    t_ns: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    phase: _Text | None = None
    allocated_bytes: _Bytes | None = None
    reserved_bytes: _Bytes | None = None
    allocated_peak_bytes: _Bytes | None = None
    reserved_peak_bytes: _Bytes | None = None
    retries: Annotated[int, Meta(ge=0, le=2**53)] | None = None

    @property
    def is_look(self) -> bool:
        """Whether it tells what was taken at a moment."""
        return self.t_ns is not None and self.allocated_bytes is not None

    @property
    def most_bytes(self) -> int:
        """Most that it says was taken."""
        said = (
            self.allocated_bytes,
            self.reserved_bytes,
            self.allocated_peak_bytes,
            self.reserved_peak_bytes,
        )
        return max(each or 0 for each in said)


class DeviceMemory(msgspec.Struct, frozen=True):
    """Of one rank."""

    total_bytes: int | None
    times_ns: Array
    """[N] epoch ns."""
    allocated: Array
    """[N] bytes."""
    allocated_peak: int
    reserved_peak: int
    reserved: int
    """At the last look."""
    retries: int | None
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    """By phase of a step, most that tensors took."""

    @property
    def comes_and_goes(self) -> int:
        """What tensors take at most beyond what they take at least, once the job has warmed up."""
        return self.allocated_peak - int(self.allocated[len(self.allocated) // 2 :].min())


def device_memory(log: RankLog, notes: list[str]) -> DeviceMemory | None:
    """None where the rank recorded none, or something else stands in its file, which is told in ``notes``."""
    looks, total = _looks(log, notes)
    if not looks:
        return None
    phases: dict[str, int] = {}
    for line in looks:
        if line.phase in _PHASES:
            phases[line.phase] = max(phases.get(line.phase, 0), line.allocated_bytes or 0)
    allocated = np.array([line.allocated_bytes for line in looks], float)
    return DeviceMemory(
        total_bytes=total,
        times_ns=np.array([line.t_ns for line in looks], float),
        allocated=allocated,
        # The job may reset torch's peaks.
        allocated_peak=max(int(allocated.max()), *(line.allocated_peak_bytes or 0 for line in looks)),
        reserved_peak=max(max(line.reserved_peak_bytes or 0, line.reserved_bytes or 0) for line in looks),
        reserved=looks[-1].reserved_bytes or 0,
        retries=max((line.retries for line in looks if line.retries is not None), default=None),
        phases=phases,
    )


def _looks(log: RankLog, notes: list[str]) -> tuple[list[_Line], int | None]:
    """(looks by time, bytes of the device): what a rank can have written."""
    path = f"{log.record.path}/{MEMORY_FILE}"
    try:
        lines, broken = _lines(log)
    except FileNotFoundError:
        return [], None  # a rank on a CPU has none
    except OSError as error:
        notes.append(f"{path} cannot be read: {error.strerror or error}.")
        return [], None
    if not lines or lines[0].schema != MEMORY_SCHEMA:
        if lines or broken:
            notes.append(f"{path} does not begin with a line of {MEMORY_SCHEMA} and is ignored.")
        return [], None
    looks = [line for line in lines if line.is_look]
    broken += sum(not line.is_look and line.schema is None for line in lines)
    total = next((line.total_bytes for line in lines if line.total_bytes is not None), None)
    if total is not None:
        possible = [line for line in looks if line.most_bytes <= total]
        if total < _LEAST_DEVICE_BYTES or 2 * len(possible) < len(looks):
            notes.append(
                f"{path}: the device's size, {total:,} bytes, is too small for what it holds, and is ignored."
            )
            total = None
        else:
            broken += len(looks) - len(possible)
            looks = possible
    if broken:
        notes.append(f"{path}: {broken} broken line{'s' if broken > 1 else ''} left out.")
    return sorted(looks, key=lambda line: line.t_ns or 0), total


def _lines(log: RankLog) -> tuple[list[_Line], int]:
    """What could be decoded, and how many lines could not. Raises OSError."""
    decode = msgspec.json.Decoder(_Line).decode
    lines, broken = [], 0
    for line in islice(log.record.lines(MEMORY_FILE), _MOST_LINES):
        try:
            lines.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            broken += 1
    return lines, broken
