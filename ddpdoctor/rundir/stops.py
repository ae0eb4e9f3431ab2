"""Reads the status files in a run directory of a job that hangs, and of ranks that crashed or raised.

For each rank, written in its own process, not by the training thread::

    RUN/ranks/<rank>/progress.json      its status, once a second while a step takes longer than that
    RUN/ranks/<rank>/standing.json      stacks of all threads, requested by the launcher because the job seemed to hang
    RUN/ranks/<rank>/hang_flight.json   torch's flight recorder at that time, in torch's format
    RUN/ranks/<rank>/faults.txt         faulthandler's text: at a fatal signal, or if a thread held the GIL for long
    RUN/ranks/<rank>/ending.json        how its Python ended: in order, or by which exception; missing if it was killed
    RUN/ranks/<rank>/calls.jsonl        the last collectives called from Python or by DDP, and which have not returned

For each host, written by the launcher without the ranks' help::

    RUN/hosts/<host>/stall.json         a standstill: its start, and each rank's process according to the kernel
    RUN/hosts/<host>/ends.json          how the ranks' processes ended: exit code, signal, out of memory
    RUN/hosts/<host>/asked.json         a request to the launcher to end the job: signal and time

Each file may be missing. Documents are replaced as a whole. :func:`read_stops` returns only fields of valid types.
``docs/formats.md`` describes the fields.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from . import layout, typed
from .calls_page import CALL_SLOTS, DDP_SLOTS
from .files import folders_in, parsed, read_bounded, read_json, unreadable
from .notes import Note
from .stepevents import CallField

PROGRESS_SCHEMA = "ddpdoctor.progress/1"
STANDING_SCHEMA = "ddpdoctor.standing/2"
ENDING_SCHEMA = "ddpdoctor.ending/1"
STALL_SCHEMA = "ddpdoctor.stall/2"
ENDS_SCHEMA = "ddpdoctor.ends/1"
ASKED_SCHEMA = "ddpdoctor.asked/1"

_MOST_CALLS_BYTES = (CALL_SLOTS + DDP_SLOTS) * 512
MOST_FAULTS_BYTES = 1 << 20
"""Upper limit of a fault's text; with a hundred threads of a hundred frames it has less."""


class End(str, Enum):
    """How a rank's Python ended, according to the rank."""

    IN_ORDER = "in_order"
    """The interpreter exited without an uncaught exception; the exit code may still be nonzero."""
    EXCEPTION = "exception"
    RAISING = "raising"
    """It had not ended: a collective or backward raised, and it is unknown whether the program handled that."""


class Standstill(str, Enum):
    """The state of a standstill."""

    LASTS = "lasts"
    RESUMED = "resumed"
    """A rank has finished a step since."""
    ENDED = "ended"
    """The job ended during it."""
    KILLED = "killed"
    """The launcher ended the job, as requested."""


@dataclass(frozen=True)
class RankStop:
    """The files of one recording of a rank; a document is None if missing."""

    rank: int
    repeat: int
    path: str
    progress: dict[str, Any] | None = None
    standing: dict[str, Any] | None = None
    ending: dict[str, Any] | None = None
    flight: str | None = None
    """Path of ``hang_flight.json``."""
    faults: str = ""
    """The text of ``faults.txt``; empty if it has more than ``MOST_FAULTS_BYTES``."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """The calls of ``calls.jsonl``, in order, with the names on disk."""


@dataclass(frozen=True)
class HostStop:
    """The launcher's files of one host."""

    host: str
    """Name of its folder."""
    stall: dict[str, Any] | None = None
    ends: dict[str, Any] | None = None
    asked: dict[str, Any] | None = None


@dataclass(frozen=True)
class Stops:
    """The status files of all ranks and hosts of a run."""

    ranks: list[RankStop] = field(default_factory=list)
    hosts: list[HostStop] = field(default_factory=list)


def signal_name(number: int) -> str:
    """The signal's name, such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_stops(run: str, notes: list[Note]) -> Stops:
    """Read the status files of ``run``; broken files are reported in ``notes``. Never raises."""
    ranks = []
    for name, path in _folders(os.path.join(run, "ranks")):
        number = layout.parse_rank_directory(name)
        if number is not None:
            ranks.append(_rank_stop(number[0], number[1], path, notes))
    hosts = [
        HostStop(
            name,
            document_in(path, layout.STALL_FILE, STALL_SCHEMA, typed.STALL, notes),
            document_in(path, layout.ENDS_FILE, ENDS_SCHEMA, typed.ENDS, notes),
            document_in(path, layout.ASKED_FILE, ASKED_SCHEMA, typed.ASKED, notes),
        )
        for name, path in _folders(os.path.join(run, "hosts"))
    ]
    return Stops(ranks, hosts)


def _rank_stop(rank: int, repeat: int, path: str, notes: list[Note]) -> RankStop:
    flight = os.path.join(path, layout.HANG_FLIGHT_FILE)
    return RankStop(
        rank,
        repeat,
        path,
        document_in(path, layout.PROGRESS_FILE, PROGRESS_SCHEMA, typed.PROGRESS, notes),
        document_in(path, layout.STANDING_FILE, STANDING_SCHEMA, typed.STANDING, notes),
        document_in(path, layout.ENDING_FILE, ENDING_SCHEMA, typed.ENDING, notes),
        flight if os.path.lexists(flight) else None,
        _read(os.path.join(path, layout.FAULTS_FILE), MOST_FAULTS_BYTES, notes).decode(errors="replace"),
        _calls(_read(os.path.join(path, layout.CALLS_FILE), _MOST_CALLS_BYTES, notes)),
    )


def launches_of(run: str, notes: list[Note]) -> list[dict[str, Any]]:
    """The readable records ``launch-<pid>.json`` of a run's launchers. Never raises."""
    found = []
    for _, folder in _folders(os.path.join(run, "hosts")):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.startswith("launch-") and name.endswith(".json"):
                found.append(document_in(folder, name, layout.RUN_SCHEMA, typed.MANIFEST, notes))
    return [each for each in found if each is not None]


def document_in(
    folder: str, name: str, schema: str, fields: Mapping[str, typed.Check], notes: list[Note], lost: str = ""
) -> dict[str, Any] | None:
    """Read the document ``name``, without fields of invalid types; None if there is none. ``lost``: what is unknown if it is
    broken. Never raises."""
    path = os.path.join(folder, name)
    if not os.path.lexists(path):
        return None
    found = read_json(path, notes, lost)
    if found is None:
        return None
    if found.get("schema") != schema:
        named = found.get("schema")
        what = "names no schema" if named is None else f"is of another schema ({str(named)[:40]})"
        notes.append(Note(f"{path} {what} and is skipped{lost and ': '}{lost}."))
        return None
    return typed.fitting(found, fields, path, notes)


def _read(path: str, most_bytes: int, notes: list[Note]) -> bytes:
    """The bytes of a file; empty if it is missing, or unreadable, which becomes a note."""
    try:
        return read_bounded(path, most_bytes)
    except OSError as error:
        if os.path.lexists(path):
            notes.append(unreadable(path, error))
        return b""


def _calls(data: bytes) -> list[dict[str, Any]]:
    """The calls in the lines of ``data``. A slot that was incomplete when the rank ended is skipped."""
    found = []
    for line in data.split(b"\n"):
        try:
            call = parsed(line.strip(b"\0 "))[0]
        except ValueError:
            continue
        if (
            isinstance(call, dict)
            and not typed.invalid_fields(call, typed.CALL)
            and call.get(CallField.NUMBER.value) is not None
        ):
            found.append(call)
    return sorted(found, key=lambda call: int(call[CallField.NUMBER.value]))


def _folders(path: str) -> list[tuple[str, str]]:
    try:
        return [(name, os.path.join(path, name)) for name in folders_in(path)]
    except (OSError, ValueError):
        return []
