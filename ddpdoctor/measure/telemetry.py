"""Reads a host's ``telemetry.jsonl`` into columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpdoctor.plain import MARK, plain
from ddpdoctor.rundir import TELEMETRY_SCHEMA, Note, bounded_lines, parsed, reading, recorded_notes
from ddpdoctor.rundir.files import broken_lines, ignored, unreadable
from ddpdoctor.rundir.typed import TELEMETRY_HEADER, TELEMETRY_SAMPLE, fitting, is_moment

_LOST = "what its processors, memory and GPUs did is not known"
_MAX_NAME = 64
"""Letters of a program's name that are kept; the kernel keeps 15 bytes."""
Column = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Times (epoch ns) and values; NaN without a reading."""


@dataclass(frozen=True)
class HostTelemetry:
    """Telemetry of one host. ``header`` is {} if missing; samples are in order of time."""

    header: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def host(self) -> str | None:
        return self.header.get("host")

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Static facts of each GPU, from the header."""
        return _dicts(self.header.get("gpus"))

    @property
    def ranks(self) -> list[int]:
        """All ranks in any sample, sorted."""
        seen = {rank for sample in self.samples for rank in _dict(sample.get("ranks"))}
        return sorted(int(rank) for rank in seen if rank.isdecimal())

    def gpu_column(self, index: int, field: str) -> Column:
        """Column of a number of the GPU with NVML index ``index``, such as ``power_watts``."""
        return self._column(self._gpu_values(index, field))

    def gpu_values(self, index: int, field: str) -> tuple[npt.NDArray[np.int64], list[Any]]:
        """The same for list fields (``throttle_reasons``, ``xid_errors``); None for null."""
        return self._times, self._gpu_values(index, field)

    def host_column(self, field: str) -> Column:
        """Column of a number of the host, such as ``memory_used_bytes``."""
        return self._column(_dict(sample.get("host")).get(field) for sample in self.samples)

    def rank_column(self, rank: int, field: str) -> Column:
        """Column of a number of a rank's process tree, such as ``cpu_percent``."""
        if field not in self._rank_columns:
            self._rank_columns[field] = self._read_rank_columns(field)
        values = self._rank_columns[field].get(str(rank))
        return self._times, np.full(len(self.samples), np.nan) if values is None else values

    def other_programs(self) -> tuple[npt.NDArray[np.int64], list[list[dict[str, Any]] | None]]:
        """The programs other than the ranks and their workers that used the most CPU; None in samples without a reading. A process
        chooses its own name, so names are put on one line, without backticks, which would end the code span in reports."""
        readings = (sample.get("others") for sample in self.samples)
        return self._times, [None if each is None else list(_programs(each)) for each in readings]

    @cached_property
    def _rank_columns(self) -> dict[str, dict[str, npt.NDArray[np.float64]]]:
        """Columns read so far, by field and rank."""
        return {}

    def _read_rank_columns(self, field: str) -> dict[str, npt.NDArray[np.float64]]:
        found: dict[str, npt.NDArray[np.float64]] = {}
        for place, sample in enumerate(self.samples):
            for rank, values in _dict(sample.get("ranks")).items():
                value = _dict(values).get(field)
                if isinstance(value, (int, float)):
                    if rank not in found:
                        found[rank] = np.full(len(self.samples), np.nan)
                    found[rank][place] = value
        for column in found.values():
            column.flags.writeable = False
        return found

    @cached_property
    def _gpu_readings(self) -> list[dict[Any, dict[str, Any]]]:
        """For each sample, the readings of each GPU, by NVML index."""
        # Reversed, so that of two with the same index the first one counts.
        return [
            {gpu.get("index"): gpu for gpu in reversed(_dicts(sample.get("gpus")))} for sample in self.samples
        ]

    def _gpu_values(self, index: int, field: str) -> list[Any]:
        return [readings[index].get(field) if index in readings else None for readings in self._gpu_readings]

    @cached_property
    def _times(self) -> npt.NDArray[np.int64]:
        times = np.array([sample["t_ns"] for sample in self.samples], dtype=np.int64)
        times.flags.writeable = False
        return times

    def _column(self, values: Iterable[Any]) -> Column:
        numbers = (float(value) if isinstance(value, (int, float)) else np.nan for value in values)
        return self._times, np.fromiter(numbers, dtype=np.float64, count=len(self.samples))


def read_telemetry(path: Path, around: tuple[int, int] | None = None) -> HostTelemetry:
    """Read ``path``. Never raises: missing files and broken lines add notes, after the sampler's own.

    ``around``: (first, last) epoch ns; samples outside are left out. A second header, from a restarted launcher, is ignored.
    """
    problems: list[Note] = []
    header: dict[str, Any] = {}
    samples, notes, invalid_fields, seen, undated = [], list[Note](), set[str](), False, 0
    for document in _documents(path, problems):
        seen = True
        if "schema" in document:
            header = header or fitting(document, TELEMETRY_HEADER, str(path), problems)
        elif "note" in document:
            code = document.get("code")
            notes += recorded_notes([str(document["note"])], [str(code)] if code is not None else [])
        elif document.get("closed"):
            continue
        elif is_moment(document.get("t_ns")) and (
            around is None or around[0] <= document["t_ns"] <= around[1]
        ):
            samples.append(fitting(document, TELEMETRY_SAMPLE, str(path), []))
            invalid_fields |= document.keys() - samples[-1].keys()
        else:
            undated += 1
    if undated or not (samples or problems):
        problems.append(Note(_missing_samples_text(path, len(samples), undated, seen)))
    if invalid_fields:
        problems.append(
            Note(f"{path}: {', '.join(sorted(invalid_fields))} of some samples are implausible and ignored.")
        )
    schema = header.get("schema")
    if not header and seen:
        problems.append(Note(f"{path} has no header line; the GPUs' and the host's facts are missing."))
    elif header and schema != TELEMETRY_SCHEMA:
        problems.append(
            Note(f"{path} has the schema {schema!r}, which is not {TELEMETRY_SCHEMA}; it is not used.")
        )
        samples = []
    _undo_clock_steps(samples)
    return HostTelemetry(header, samples, list(dict.fromkeys(notes)) + problems)


def _missing_samples_text(path: Path, kept: int, undated: int, seen: bool) -> str:
    lost = "" if kept else f": {_LOST}"
    if not undated:
        return f"{path} {'holds no sample' if seen else 'is empty'}{lost}."
    return (
        f"{path}: {undated} of {undated + kept} samples have no time (t_ns), or one more than a year away from the "
        f"job's steps, and are left out{lost}."
    )


def _undo_clock_steps(samples: list[dict[str, Any]]) -> None:
    """Shift the times after each backward step of the clock, in place, so that they increase. Samples are written in order of time."""
    behind, usual = 0, 0
    for before, sample in pairwise(samples):
        ahead = before["t_ns"] - (sample["t_ns"] + behind)
        if ahead > 0:
            behind += ahead + usual
        sample["t_ns"] += behind
        usual = sample["t_ns"] - before["t_ns"]


def _documents(path: Path, problems: list[Note]) -> Iterator[dict[str, Any]]:
    """Yields the file's JSON objects; other lines add entries to ``problems``."""
    broken, cut, odd = 0, False, list[str]()
    try:
        with reading(str(path)) as source:
            for line in bounded_lines(source):
                try:
                    document, found = parsed(line) if line.strip() else ({}, [])
                    odd += found
                except ValueError:
                    document = None
                if isinstance(document, dict):
                    if document:
                        yield document
                elif line.endswith(b"\n"):
                    broken += 1
                else:
                    cut = True
    except OSError as error:
        problems.append(unreadable(str(path), error, _LOST))
    if odd:
        problems.append(ignored(str(path), odd))
    if cut:
        problems.append(Note(f"{path}: the last line is truncated and ignored."))
    if broken:
        problems.append(broken_lines(str(path), broken))


def _programs(reading: object) -> Iterator[dict[str, Any]]:
    """The complete entries of a reading of other programs, with plain names."""
    for each in _dicts(reading):
        name = " ".join(plain(each.get("name") or "").replace("`", MARK).split())[:_MAX_NAME]
        if name and each.get("cores") is not None and each.get("processes") is not None:
            yield each | {"name": name}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
