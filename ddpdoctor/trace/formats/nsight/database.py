"""Reads plain tables of an untrusted SQLite file, and parses the texts and payloads of NVTX ranges.

The file is opened read-only and immutable, so SQLite reads no journal next to it. An authorizer rejects everything that a schema
can have besides tables: views, triggers, virtual tables, generated columns, functions in indexes. Limits: some megabytes per value;
limits of the rows per table, of all texts together (a few times the file's size), and of the total time depend on the file's size.
A value of an unexpected type counts as absent.
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
from ddpdoctor.trace.sources import report_progress

Fields = dict[str, int]
"""NCCL's label of a payload entry → value."""
RANKS, RANK, COMMUNICATOR, MESSAGE_BYTES = (
    "No. of ranks",
    "Rank",
    "NCCL communicator ID",
    "Message size [bytes]",
)
"""Labels of the payload entries that are used."""
_HEAD = struct.Struct("<IIIIQQ")
"""Domain, reserved, schema, reserved, size of the payload, size including this header."""
_FORMATS = {
    4: struct.Struct("<i"),
    5: struct.Struct("<I"),
    17: struct.Struct("<q"),
    18: struct.Struct("<Q"),
    22: struct.Struct("<Q"),
}
"""Integer formats by NVTX type: int, unsigned int, int64, uint64 and size_t (nvToolsExtPayload.h)."""
_MAX_PAYLOAD_BYTES = 1 << 12


class Payloads:
    """Decodes the payloads of a file's NVTX ranges."""

    def __init__(self, database: Database) -> None:
        self._fields: dict[int, list[tuple[str, struct.Struct, int]]] = defaultdict(list)
        listed = database.first_rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "type", "name", "offset")
        for schema, kind, name, offset in dict.fromkeys(listed):
            at = 0 if offset is None else offset
            known = isinstance(name, str) and isinstance(schema, int) and isinstance(kind, int)
            if known and kind in _FORMATS and isinstance(at, int) and 0 <= at < _MAX_PAYLOAD_BYTES:
                self._fields[schema].append((name, _FORMATS[kind], at))

    def decode(self, data: bytes | None) -> Fields:
        """Values of a range's payload by label; {} without a payload, or if the file does not describe its schema."""
        if data is None or not _HEAD.size <= len(data) <= _MAX_PAYLOAD_BYTES:
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
"""CUDA graphs recorded as one event each, which is the default of Nsight Systems."""
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
OS_CALLS = "OSRT_API"
NAMES = ("demangledName", "shortName", "mangledName")
"""Columns of a kernel's name, in order of preference. Kineto writes the first one."""
EXPORT_TABLES = frozenset((KERNELS, GRAPHS, COPIES, FILLS, RUNTIME, NVTX, OS_CALLS))
"""Tables of which an export of Nsight Systems has at least one."""
OPERATOR, ANNOTATION, LIBRARY = "cpu_op", "user_annotation", "library"

_FIELDS = (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = ")
"""Fields that ``emit_nvtx`` appends to a name, in this order."""
_SIZES = re.compile(r", sizes = (\[[][0-9, -]*\])")
_NAMESPACE = re.compile(
    r"(?:aten|autograd|prims?|torch|torchvision|torchaudio|quantized|flash_attn|xformers|_?c10d(?:_functional)?)::"
)
"""Namespaces of operators without appended fields."""
_OPERATOR = re.compile(r"(?!FSDP::)[\w.]+::[\w.:]+$|record_param_comms$|detach$|[a-z]\w*_$|\w+Backward\d*$")
"""Names of operators with appended fields: of any namespace, or in-place, autograd and profiler ones without a namespace."""
_LIBRARY = re.compile(r"nccl[A-Z]|cu(?:blas|dnn|sparse|solver|fft|tensor|rand)|cub::|thrust::|nvshmem|ucp?_")
"""Calls of libraries that push their own NVTX ranges."""
_TRAINING_PREFIXES = (
    "c10d::", "gloo:", "nccl:", "Optimizer.step#", "DistributedDataParallel.", "ProfilerStep", "autograd::engine",
)  # fmt: skip


class Range(msgspec.Struct, frozen=True):
    """A parsed NVTX range text."""

    name: str
    category: str
    shapes: str = ""
    """Dimensions of an operator's inputs as compact JSON; "" if unknown."""


def is_training_range(text: str | None) -> bool:
    """Whether only training processes push such a range."""
    return text is not None and text.startswith(_TRAINING_PREFIXES)


def parse_range_text(text: str) -> Range:
    """Parses the text of a range."""
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
    """Whether a name from ``emit_nvtx`` is an operator's. Annotations have no autograd sequence number."""
    if is_annotation_name(name):
        return False
    numbered = rest.startswith(_FIELDS[0]) and not rest.startswith(", seq = -")
    return numbered or _NAMESPACE.match(name) is not None or _OPERATOR.match(name) is not None


PROCESS_BITS = 24
"""A global thread id is the process key, shifted by this many bits, plus the thread id."""
MISSING = np.iinfo(np.int64).min
"""Marks an absent number."""
MAX_TEXT = 1 << 15
"""Longest text that is read; names of templated kernels have some thousand characters."""

_BATCH_ROWS = 1 << 13
"""Rows per batch. A batch takes at most some hundred megabytes with the longest texts and payloads."""
_MAX_READS = 16
"""Limit of the texts and payloads that are read, as a multiple of the file's size. Some tables are read several times."""
_MIN_BYTE_BUDGET = 64 << 20
_MIN_ROW_BYTES = 8
"""Smallest size of an event's row: its length, header, two times and a name."""
_MAX_VALUE_BYTES = 64 << 20
"""Longest value. The strings include the job's output, but no event refers to it."""
_MIN_TIMEOUT_S = 120.0
_MIN_BYTES_PER_S = 500_000
"""Slowest accepted rate. A busy processor reads about twenty million bytes per second."""
_MAX_TIMEOUT_S = 4 * 3600.0
"""Limit of the timeout, because a sparse file may have any size."""
_IDS_PER_QUERY = 500
"""Ids per query; SQLite allows some thousands."""
_INSTRUCTIONS = 200_000
"""SQLite instructions between two checks of the timeout, which take some milliseconds."""
_BROKEN = (sqlite3.Error, UnicodeError)
"""Errors of damaged files. UnicodeError: SQLite's message quotes a name in a damaged schema."""
_SELECTS = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ))
_FUNCTIONS = frozenset(("substr", "typeof", "coalesce", "length"))
_PRAGMAS = frozenset(("table_xinfo",))
_SETTINGS = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "query_only = ON")

Batch = dict[str, Any]
"""Column → numbers (int64, absent ones :data:`MISSING`) or a list of texts or bytes (absent ones None)."""


class DamagedError(Exception):
    """The rest of the file cannot be read. The text continues a sentence after the file's name: "is damaged"."""


class Database:
    """The tables of one file. A context manager."""

    def __init__(self, path: str) -> None:
        """Raises :class:`UnusableInput` if ``path`` cannot be opened as SQLite."""
        self.path = path
        self.process: int | None = None
        """Process key from :func:`.identity.process_of`. If it is set, :meth:`batches` reads only the rows of this process from tables
        that have a column of global ids."""
        try:
            size = Path(path).stat().st_size
            uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(uri, uri=True)
        except OSError as error:
            raise UnusableInput(f"{path} cannot be read: {reason_of(error).lower()}.") from None
        except sqlite3.Error as error:
            raise UnusableInput(f"{path} cannot be opened: {error}.") from None
        self._max_rows = size // _MIN_ROW_BYTES
        self._bytes_left = _MIN_BYTE_BUDGET + _MAX_READS * size
        self._deadline_s = time.monotonic() + min(_MIN_TIMEOUT_S + size / _MIN_BYTES_PER_S, _MAX_TIMEOUT_S)
        self._pending_rows: dict[str, int] = {}
        self._strings: dict[int, str] = {}
        self._expected_rows = self._passed_rows = 0
        self.tables: dict[str, frozenset[str]] = {}
        self._keyed: set[str] = set()
        try:
            self._prepare()
            self._find_tables()
        except (*_BROKEN, DamagedError):
            self.close()
            raise UnusableInput(f"{path} is a damaged SQLite file: export it again.") from None

    def _prepare(self) -> None:
        connection = self._connection
        connection.text_factory = self._text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        connection.set_progress_handler(lambda: time.monotonic() > self._deadline_s, _INSTRUCTIONS)
        connection.set_authorizer(_authorize)

    def _text(self, data: bytes) -> str:
        self._count(len(data))
        return data.decode("utf-8", "replace")

    def _count(self, count: int) -> None:
        """Counts bytes read. Raises :class:`DamagedError` above the limit: a damaged file may refer to a page many times."""
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
        """Finds the names and columns of all plain tables."""
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
        """Whether the file has this table with these columns."""
        return table in self.tables and self.tables[table].issuperset(columns)

    def track_progress(self, tables: Iterable[str]) -> None:
        """Reports progress while these tables are read."""
        self._pending_rows = {table: self._last_row(table) for table in tables if table in self.tables}
        self._expected_rows, self._passed_rows = sum(self._pending_rows.values()), 0

    def _last_row(self, table: str) -> int:
        """Approximate number of rows: the last row id. SQLite would have to read all rows to count them."""
        sql = f"SELECT rowid FROM {_quoted(table)} ORDER BY rowid DESC LIMIT 1"
        try:
            number = next((row[0] for batch in self._rows(sql, ()) for row in batch), 0)
        except DamagedError:
            return 0
        return min(max(number, 0), self._max_rows) if isinstance(number, int) else 0

    def batches(
        self,
        table: str,
        numbers: Sequence[str] = (),
        texts: Sequence[str] = (),
        raw: Sequence[str] = (),
        where: str = "",
    ) -> Iterator[Batch]:
        """Yields the rows of ``table`` that satisfy ``where``, in order; none if the file has no such table.

        Values of columns that the table lacks are absent. ``raw`` columns are read as bytes. Raises :class:`DamagedError`.
        """
        if table not in self.tables:
            return
        table_columns = self.tables[table]
        cut = {name: f"substr(e.{_quoted(name)}, 1, {MAX_TEXT})" for name in (*raw, *texts)}
        expressions = {name: f"e.{_quoted(name)}" for name in numbers} | cut
        selected = [text if name in table_columns else "NULL" for name, text in expressions.items()]
        filters, values = [where] if where else [], []
        process_column = next((name for name in ("globalTid", "globalPid") if name in table_columns), None)
        if self.process is not None and process_column is not None:
            filters.append(f"(e.{process_column} >> {PROCESS_BITS}) = ?")
            values.append(self.process)
        sql = f"SELECT {', '.join(selected)} FROM {_quoted(table)} AS e NOT INDEXED"
        sql += f" WHERE {' AND '.join(filters)}" if filters else ""
        seen = 0
        for rows in self._rows(sql, values):
            seen += len(rows)
            if self._expected_rows:
                report_progress((self._passed_rows + seen) / self._expected_rows)
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
        self._passed_rows += self._pending_rows.pop(table, 0)

    def strings(self, ids: IntColumn) -> list[str]:
        """[ids] string of each; "" for :data:`MISSING` and unknown ids. Raises :class:`DamagedError`."""
        numbers = ids.tolist()
        new = set(numbers) - self._strings.keys() - {MISSING}
        if new and self.has("StringIds", "id", "value"):
            self._read_strings(new)
        return [self._strings.get(number, "") for number in numbers]

    def _read_strings(self, ids: set[int]) -> None:
        sql = f"SELECT id, substr(value, 1, {MAX_TEXT}) FROM StringIds"
        keyed = "StringIds" in self._keyed
        left = iter(ids)
        while some := tuple(islice(left, _IDS_PER_QUERY)):
            which = f" WHERE id IN ({', '.join('?' * len(some))})" if keyed else ""
            for rows in self._rows(sql + which, some if keyed else ()):
                self._strings.update((k, v) for k, v in rows if isinstance(k, int) and isinstance(v, str))
            if not keyed:
                break
        self._strings |= dict.fromkeys(ids - self._strings.keys(), "")

    def first_rows(self, table: str, *columns: str, most: int = 100_000) -> list[tuple[Any, ...]]:
        """The first ``most`` rows of a descriptive table; [] if it lacks one of the columns or is damaged."""
        if not self.has(table, *columns):
            return []
        selected = ", ".join(
            f"CASE typeof({_quoted(c)}) WHEN 'integer' THEN {_quoted(c)} ELSE substr({_quoted(c)}, 1, {MAX_TEXT}) END"
            for c in columns
        )
        try:
            rows = self._rows(f"SELECT {selected} FROM {_quoted(table)} NOT INDEXED LIMIT {most}", ())
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
                if seen > self._max_rows:
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


def _authorize(
    action: int, first: str | None, second: str | None, _database: object, through: str | None
) -> int:
    """SQLite authorizer that allows reading tables, but not by views or triggers of the file."""
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
    """[values] as int64; :data:`MISSING` for values that are not integers."""
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
