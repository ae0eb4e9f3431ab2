"""Plain tables of an SQLite file that anybody may have written.

The file is opened read-only and as one that nobody changes, so that no journal beside it is looked at. What a schema can hold
beside tables (views, triggers, virtual tables, generated columns, functions in indexes) is never asked: SQLite is
told to refuse it. A table has no more rows than fit into the file, a value no more than some megabytes, all texts together no more than
a few times the file's size, and all of it no more time than that can need. A value of another type than expected is absent.
"""

from __future__ import annotations

import re
import sqlite3
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of
from ddpdoctor.trace.columns import IntColumn
from ddpdoctor.trace.formats.kineto.build import is_annotation_name
from ddpdoctor.trace.sources import tell

Fields = dict[str, int]
"""Label of an entry, as NCCL describes it, → value."""


RANKS, RANK, COMMUNICATOR, MESSAGE_BYTES = (
    "No. of ranks",
    "Rank",
    "NCCL communicator ID",
    "Message size [bytes]",
)
"""Labels of the entries that tell something here."""


_HEAD = struct.Struct("<IIIIQQ")
"""Domain, reserved, schema, reserved, size of the payload, size with this head."""


_FORMATS = {
    4: struct.Struct("<i"),
    5: struct.Struct("<I"),
    17: struct.Struct("<q"),
    18: struct.Struct("<Q"),
    22: struct.Struct("<Q"),
}
"""Whole numbers by NVTX's type: int and its unsigned one, those of 64 bits, and size_t (nvToolsExtPayload.h)."""


_LONGEST_BYTES = 1 << 12


class Payloads:
    """Decodes what the ranges of one file carry."""

    def __init__(self, database: Database) -> None:
        self._fields: dict[int, list[tuple[str, struct.Struct, int]]] = defaultdict(list)
        listed = database.small("NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "type", "name", "offset")
        for schema, kind, name, offset in dict.fromkeys(listed):
            at = 0 if offset is None else offset
            known = isinstance(name, str) and isinstance(schema, int) and isinstance(kind, int)
            if known and kind in _FORMATS and isinstance(at, int) and 0 <= at < _LONGEST_BYTES:
                self._fields[schema].append((name, _FORMATS[kind], at))

    def of(self, data: bytes | None) -> Fields:
        """What a range's payload holds; {} without one, or where it is none that the file describes."""
        if data is None or not _HEAD.size <= len(data) <= _LONGEST_BYTES:
            return {}
        _, _, schema, _, size, whole = _HEAD.unpack_from(data)
        if whole != len(data) or size != len(data) - _HEAD.size:
            return {}
        return {
            name: kind.unpack_from(data, _HEAD.size + at)[0]
            for name, kind, at in self._fields.get(schema, ())
            if at + kind.size <= size
        }


KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
"""CUDA graphs that were recorded as wholes, which is how Nsight Systems does it unless it is told otherwise."""
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
OS_CALLS = "OSRT_API"
NAMES = ("demangledName", "shortName", "mangledName")
"""Of a kernel, the one that Kineto writes first."""
OF_EXPORTS = frozenset((KERNELS, GRAPHS, COPIES, FILLS, RUNTIME, NVTX, OS_CALLS))
"""Any of them makes a file one of Nsight Systems."""


OPERATOR, ANNOTATION, LIBRARY = "cpu_op", "user_annotation", "library"

_FIELDS = (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = ")
"""What follows an emitted name, in this order."""
_SIZES = re.compile(r", sizes = (\[[][0-9, -]*\])")
_NAMESPACE = re.compile(
    r"(?:aten|autograd|prims?|torch|torchvision|torchaudio|quantized|flash_attn|xformers|_?c10d(?:_functional)?)::"
)
"""Of operators whose text says nothing else."""
_OPERATOR = re.compile(r"(?!FSDP::)[\w.]+::[\w.:]+$|record_param_comms$|detach$|[a-z]\w*_$|\w+Backward\d*$")
"""Emitted names that are operators': of any library's namespace; without one those of the profiler, in place, and of autograd."""
_LIBRARY = re.compile(r"nccl[A-Z]|cu(?:blas|dnn|sparse|solver|fft|tensor|rand)|cub::|thrust::|nvshmem|ucp?_")
"""Calls of libraries that NVIDIA's tools mark themselves."""
_OF_A_RANK = (
    "c10d::", "gloo:", "nccl:", "Optimizer.step#", "DistributedDataParallel.", "ProfilerStep", "autograd::engine",
)  # fmt: skip


class Range(msgspec.Struct, frozen=True):
    """What a range is."""

    name: str
    category: str
    shapes: str = ""
    """Dimensions of an operator's inputs as compact JSON, "" where they are not told."""


def marks_a_rank(text: str | None) -> bool:
    """Whether only a process that trains pushes such a range."""
    return text is not None and text.startswith(_OF_A_RANK)


def read_text(text: str) -> Range:
    """What a range of this text is."""
    if _LIBRARY.match(text):
        return Range(text, LIBRARY)
    begins = [place for field in _FIELDS if (place := text.find(field)) > 0]
    if not begins:
        is_operator = _NAMESPACE.match(text) is not None and not is_annotation_name(text)
        return Range(text, OPERATOR if is_operator else ANNOTATION)
    name, rest = text[: min(begins)], text[min(begins) :]
    sizes = _SIZES.search(rest)
    category = OPERATOR if _is_operator(name, rest) else ANNOTATION
    return Range(name, category, sizes[1].replace(" ", "") if sizes else "")


def _is_operator(name: str, rest: str) -> bool:
    """Whether an emitted name is an operator's: an annotation has no number in the sequence of autograd, nor sizes."""
    if is_annotation_name(name):
        return False
    numbered = rest.startswith(_FIELDS[0]) and not rest.startswith(", seq = -")
    return numbered or _NAMESPACE.match(name) is not None or _OPERATOR.match(name) is not None


PROCESS_BITS = 24
"""A thread's global number is its process's, shifted by so many bits, and its own."""
MISSING = np.iinfo(np.int64).min
"""Stands where a number is absent."""
LONGEST_TEXT = 1 << 15
"""Characters that are read of a text: names of kernels made of templates have some thousands."""

_BATCH_ROWS = 1 << 13
"""With the longest texts and payloads some hundred megabytes."""
_MOST_READINGS = 16
"""Times that what a file holds of texts and payloads is read in all: some tables are asked several times."""
_LEAST_BYTES = 64 << 20
_LEAST_ROW_BYTES = 8
"""A row of an event has at least its length, its header, two times and a name."""
_LONGEST_VALUE_BYTES = 64 << 20
"""Logs of the job's output lie among the strings, but no event refers to them."""
_LEAST_S = 120.0
_BYTES_PER_S = 500_000
"""On one busy processor it is twenty million."""
_MOST_S = 4 * 3600.0
"""A file of holes has any size."""
_ASKED_AT_ONCE = 500
"""Numbers in one question; SQLite takes some thousands."""
_INSTRUCTIONS = 200_000
"""Of SQLite's machine, between two looks at the clock: some milliseconds."""
_BROKEN = (sqlite3.Error, UnicodeError)
"""What reading raises; names of a damaged schema are no text, and SQLite quotes them."""
_SELECTS = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ))
_FUNCTIONS = frozenset(("substr", "typeof", "coalesce", "length"))
_PRAGMAS = frozenset(("table_xinfo",))
_SETTINGS = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "query_only = ON")

Batch = dict[str, Any]
"""Column → numbers (int64, :data:`MISSING` where absent) or a list of texts or bytes (None where absent)."""


class DamagedError(Exception):
    """The file cannot be read on; the text says what it does, as after its name: "is damaged"."""


class Database:
    """Tables of one file. To be closed by ``with``."""

    def __init__(self, path: str) -> None:
        """Raises :class:`UnusableInput` where ``path`` cannot be opened as SQLite."""
        self.path = path
        self.process: int | None = None
        """What the global numbers of a process's threads begin with: from when it is set on, :meth:`batches` are of that one alone, where
        a table tells processes apart."""
        try:
            size = Path(path).stat().st_size
            uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(uri, uri=True)
        except OSError as error:
            raise UnusableInput(f"{path} cannot be read: {reason_of(error).lower()}.") from None
        except sqlite3.Error as error:
            raise UnusableInput(f"{path} cannot be opened: {error}.") from None
        self._most_rows = size // _LEAST_ROW_BYTES
        self._bytes_left = _LEAST_BYTES + _MOST_READINGS * size
        self._until_s = time.monotonic() + min(_LEAST_S + size / _BYTES_PER_S, _MOST_S)
        self._ahead_rows: dict[str, int] = {}
        self._expected_rows = self._passed_rows = 0
        try:
            self._prepare()
            self.tables: dict[str, frozenset[str]] = {}
            self._keyed: set[str] = set()
            self._find_tables()
        except (*_BROKEN, DamagedError):
            self.close()
            raise UnusableInput(f"{path} is a damaged SQLite file: export it again.") from None

    def _prepare(self) -> None:
        connection = self._connection
        connection.text_factory = self._text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE_BYTES)
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        connection.set_progress_handler(lambda: time.monotonic() > self._until_s, _INSTRUCTIONS)
        connection.set_authorizer(_allowed)

    def _text(self, data: bytes) -> str:
        self._count(len(data))
        return data.decode("utf-8", "replace")

    def _count(self, count: int) -> None:
        """Pages of a file may refer to each other as they like: what is read is bounded by what there is."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise DamagedError("holds more text than it has room for")

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the file."""
        self._connection.close()

    def _find_tables(self) -> None:
        """Name and columns of each table that is nothing but one."""
        listed = self._rows("SELECT name, sql FROM sqlite_master WHERE type = 'table'", ())
        for name, sql in [(row[0], row[1]) for batch in listed for row in batch]:
            if not isinstance(name, str) or not isinstance(sql, str) or "\0" in name:
                continue
            if not sql.lstrip().upper().startswith("CREATE TABLE"):
                continue
            try:
                columns = self._connection.execute(f"PRAGMA table_xinfo({_quoted(name)})").fetchall()
            except _BROKEN:
                continue
            if all(hidden == 0 for *_, hidden in columns):
                self.tables[name] = frozenset(str(column[1]) for column in columns)
                if [str(column[1]) for column in columns if column[5]] == ["id"]:
                    self._keyed.add(name)

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is this table with these columns."""
        return table in self.tables and self.tables[table].issuperset(columns)

    def expect(self, tables: Iterable[str]) -> None:
        """From here on say how far the reading of these tables is."""
        self._ahead_rows = {table: self._last_row(table) for table in tables if table in self.tables}
        self._expected_rows, self._passed_rows = sum(self._ahead_rows.values()), 0

    def _last_row(self, table: str) -> int:
        """About how many rows a table has: SQLite counts none without reading all of them, but knows the number of the last."""
        sql = f"SELECT rowid FROM {_quoted(table)} ORDER BY rowid DESC LIMIT 1"
        try:
            number = next((row[0] for batch in self._rows(sql, ()) for row in batch), 0)
        except DamagedError:
            return 0
        return min(max(number, 0), self._most_rows) if isinstance(number, int) else 0

    def _tell(self, rows: int) -> None:
        """So many rows of the table at hand were read."""
        if self._expected_rows:
            tell((self._passed_rows + rows) / self._expected_rows)

    def batches(
        self,
        table: str,
        numbers: Sequence[str] = (),
        texts: Sequence[str] = (),
        raw: Sequence[str] = (),
        where: str = "",
    ) -> Iterator[Batch]:
        """The rows of ``table`` in their order, those for which ``where`` holds; none where there is no such table.

        A column that the table lacks is absent in each row. ``raw`` are read as bytes. Raises :class:`DamagedError`.
        """
        if table not in self.tables:
            return
        own = self.tables[table]
        asked = [
            *(f"e.{_quoted(name)}" if name in own else "NULL" for name in numbers),
            *(
                f"substr(e.{_quoted(name)}, 1, {LONGEST_TEXT})" if name in own else "NULL"
                for name in (*raw, *texts)
            ),
        ]
        told_by = next((name for name in ("globalTid", "globalPid") if name in own), None)
        of_one = self.process is not None and told_by is not None
        filters = [*([where] if where else []), *([f"(e.{told_by} >> {PROCESS_BITS}) = ?"] if of_one else [])]
        sql = f"SELECT {', '.join(asked)} FROM {_quoted(table)} AS e NOT INDEXED"
        sql += f" WHERE {' AND '.join(filters)}" if filters else ""
        seen = 0
        for rows in self._rows(sql, (self.process,) if self.process is not None and of_one else ()):
            seen += len(rows)
            self._tell(seen)
            columns = list(zip(*rows, strict=True))
            batch: Batch = {}
            for name in numbers:
                batch[name] = as_numbers(columns.pop(0))
            for name in raw:
                batch[name] = [value if isinstance(value, bytes) else None for value in columns.pop(0)]
                self._count(sum(len(value) for value in batch[name] if value is not None))
            for name in texts:
                batch[name] = [value if isinstance(value, str) else None for value in columns.pop(0)]
            yield batch
        self._passed_rows += self._ahead_rows.pop(table, 0)

    def strings(self, ids: Sequence[int]) -> dict[int, str]:
        """What the numbers of the file's names stand for, as far as it tells. Raises :class:`DamagedError`."""
        found: dict[int, str] = {}
        if not self.has("StringIds", "id", "value") or not ids:
            return found
        sql = f"SELECT id, substr(value, 1, {LONGEST_TEXT}) FROM StringIds"
        left = iter(ids)
        while some := tuple(islice(left, _ASKED_AT_ONCE)):
            keyed = "StringIds" in self._keyed
            which = f" WHERE id IN ({', '.join('?' * len(some))})" if keyed else ""
            for rows in self._rows(sql + which, some if keyed else ()):
                found.update((k, v) for k, v in rows if isinstance(k, int) and isinstance(v, str))
            if not keyed:
                break
        return found

    def small(self, table: str, *columns: str, most: int = 100_000) -> list[tuple[Any, ...]]:
        """The first rows of a table that describes something, as they are; [] where it lacks one of the columns."""
        if not self.has(table, *columns):
            return []
        asked = ", ".join(
            f"CASE typeof({_quoted(c)}) WHEN 'integer' THEN {_quoted(c)} ELSE substr({_quoted(c)}, 1, {LONGEST_TEXT}) END"
            for c in columns
        )
        try:
            rows = self._rows(f"SELECT {asked} FROM {_quoted(table)} NOT INDEXED LIMIT {most}", ())
            return [row for batch in rows for row in batch]
        except DamagedError:
            return []

    def _rows(self, sql: str, values: Sequence[int]) -> Iterator[list[tuple[Any, ...]]]:
        seen = 0
        try:
            cursor = self._connection.execute(sql, values)
            cursor.arraysize = _BATCH_ROWS
            while rows := cursor.fetchmany():
                seen += len(rows)
                if seen > self._most_rows:
                    raise DamagedError("holds more rows than it has room for")
                yield rows
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise DamagedError("takes longer to read than a file of its size can") from None
            raise DamagedError(f"cannot be read on ({error})") from None
        except sqlite3.Error as error:
            raise DamagedError(f"is damaged ({error})") from None
        except UnicodeError:
            raise DamagedError("is damaged") from None


def _allowed(
    action: int, first: str | None, second: str | None, _database: object, through: str | None
) -> int:
    """Whether SQLite may do what a statement asks: read tables, by none of the file's own views and triggers."""
    if through is not None:
        return sqlite3.SQLITE_DENY
    if action in _SELECTS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_OK if (second or "").lower() in _FUNCTIONS else sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if first in _PRAGMAS else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def as_numbers(values: Sequence[Any]) -> IntColumn:
    """Whole numbers as a column; :data:`MISSING` for all else."""
    try:
        return (
            np.fromiter(values, np.int64, len(values))
            if set(map(type, values)) == {int}
            else _cleaned(values)
        )
    except OverflowError:
        return _cleaned(values)


def _cleaned(values: Sequence[Any]) -> IntColumn:
    kept = [value if type(value) is int else MISSING for value in values]
    return np.fromiter(kept, np.int64, len(kept))
