"""Traces → the SQLite file that Nsight Systems would have exported of the same processes.

Written from the schema alone, and knowing nothing of the reader: what Nsight Systems cannot record (Python frames, annotations on
the device, names and numbers of process groups) is left out, what it writes otherwise (versions in names of calls, numbers for
kinds of copies, NCCL's binary payloads) is written so. ``NEW`` is the schema of 2026, ``OLD`` one of 2021: texts by number
only, no tables of enumerations, no payloads, no environment, and times from the start of the session.
"""

from __future__ import annotations

import re
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddpdoctor.trace import RankTrace, classify

NEW, OLD = "2026", "2021"
SESSION_NS = 35_255_823_190
"""A machine's own clock as a session began, as it stands in a real export."""
LEAD_NS = 2_000_000_000
"""From then to the first event."""
ALLREDUCE, ALLGATHER, INIT = 16777223, 16777220, 16777227
CALLS = {
    "allreduce": ("ncclAllReduce", ALLREDUCE),
    "allgather": ("ncclAllGather", ALLGATHER),
    "reducescatter": ("ncclReduceScatter", ALLREDUCE),
    "broadcast": ("ncclBroadcast", ALLREDUCE),
}
BYTES = {
    "float": 4,
    "half": 2,
    "bfloat16": 2,
    "double": 8,
    "long": 8,
    "int": 4,
    "byte": 1,
    "bool": 1,
    "float32": 4,
}
OPERATIONS = {
    "HtoD": (1, "HTOD"),
    "DtoH": (2, "DTOH"),
    "DtoD": (8, "DTOD"),
    "HtoH": (9, "HTOH"),
    "PtoP": (10, "PTOP"),
}
MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed")
COPY = re.compile(r"(\wto\w)\s*(?:\((\w+) -> (\w+)\))?")

_SCHEMA = {
    NEW: """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,
  srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT,
  globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, binaryData TEXT);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE META_DATA_CAPTURE (name TEXT NOT NULL, value TEXT);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER);
CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL,
  stopTime INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL,
  nameEnum INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER,
  computeMajor INTEGER, computeMinor INTEGER);
CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, idx INTEGER NOT NULL,
  flags INTEGER, type INTEGER, name TEXT, description TEXT, arrayOrUnionDetail INTEGER, offset INTEGER);
""",
    OLD: """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, contextId INT NOT NULL,
  streamId INT NOT NULL, correlationId INT NOT NULL, demangledName INT NOT NULL, shortName INT NOT NULL, gridX INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, streamId INT NOT NULL,
  correlationId INT NOT NULL, bytes INT NOT NULL, copyKind INT NOT NULL, srcKind INT NOT NULL, dstKind INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, streamId INT NOT NULL,
  correlationId INT NOT NULL, value INT NOT NULL, bytes INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL, globalTid INT NOT NULL,
  correlationId INT NOT NULL, nameId INT NOT NULL, returnValue INT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, text TEXT, globalTid INT, textId INT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT NOT NULL, value TEXT NOT NULL);
""",
}


@dataclass
class _File:
    """A file that is being written."""

    connection: sqlite3.Connection
    schema: str
    from_ns: int
    """Of the traces' clock, what becomes the session's start."""
    strings: dict[str, int] = field(default_factory=dict)
    columns: dict[str, set[str]] = field(default_factory=dict)
    """Of each table, as far as they were asked for."""

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def at(self, time_ns: int) -> int:
        return time_ns - self.from_ns + (SESSION_NS if self.schema == NEW else 0)

    def put(self, table: str, **values: object) -> None:
        """One row; what this version's table has no column for is dropped."""
        if table not in self.columns:
            self.columns[table] = {row[1] for row in self.connection.execute(f'PRAGMA table_info("{table}")')}
        columns = self.columns[table]
        kept = {name: value for name, value in values.items() if name in columns}
        if kept:
            names, marks = ", ".join(f'"{name}"' for name in kept), ", ".join("?" * len(kept))
            self.connection.execute(f'INSERT INTO "{table}" ({names}) VALUES ({marks})', tuple(kept.values()))


def export(
    path,
    traces: Sequence[RankTrace],
    schema: str = NEW,
    *,
    environment: dict[str, str] | None = None,
    command: str = "python train.py",
    payloads: bool = True,
):
    """Writes one file of the processes that ``traces`` are, all of one host; returns its path."""
    begin = min(int(trace.start_ns[0]) for trace in traces)
    with sqlite3.connect(path) as connection:
        connection.executescript(_SCHEMA[schema])
        file = _File(connection, schema, begin - LEAD_NS)
        _describe(file, traces, environment or {}, command)
        for number, trace in enumerate(traces):
            _process(file, trace, 111 + 33 * number, payloads and schema == NEW)
        rows = ((number, text) for text, number in file.strings.items())
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
    connection.close()
    return str(path)


def _describe(file: _File, traces, environment, command) -> None:
    meta = traces[0].meta
    if meta.clock == "epoch":
        file.put(
            "TARGET_INFO_SESSION_START_TIME", utcEpochNs=file.from_ns, utcTime="", systemClockNs=SESSION_NS
        )
    if meta.host:
        file.put(
            "TARGET_INFO_SYSTEM_ENV",
            globalVid=1 << 48,
            devStateName="",
            name="Hostname",
            nameEnum=1,
            value=meta.host,
        )
    if file.schema == OLD:
        return
    file.put("ANALYSIS_DETAILS", globalVid=1 << 48, duration=1, startTime=SESSION_NS, stopTime=SESSION_NS + 1)
    file.put("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2026.2.1.210")
    words = command.split()
    file.put("META_DATA_CAPTURE", name="PROCESS_0:COMMAND", value=words[0])
    for i, word in enumerate(words[1:]):
        file.put("META_DATA_CAPTURE", name=f"PROCESS_0:ARGUMENT_{i}", value=word)
    for name, value in environment.items():
        file.put("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{name}="{value}"')
    for device in meta.devices:
        named = {"id": "id", "name": "name", "totalGlobalMem": "totalMemory", "numSms": "smCount"}
        named |= {"computeMajor": "computeMajor", "computeMinor": "computeMinor"}
        file.put("TARGET_INFO_GPU", **{column: device.get(key) for key, column in named.items()})
    for number, name in OPERATIONS.values():
        file.put("ENUM_CUDA_MEMCPY_OPER", id=number, name=f"CUDA_MEMCPY_KIND_{name}", label=name)
    for number, label in enumerate(MEMORIES):
        file.put("ENUM_CUDA_MEM_KIND", id=number, name=label.upper(), label=label)
    for schema, kind, label, offset in (
        (INIT, 18, "NCCL communicator ID", None),
        (INIT, 5, "No. of ranks", 8),
        (INIT, 5, "Rank", 12),
        (ALLREDUCE, 18, "NCCL communicator ID", None),
        (ALLREDUCE, 22, "Message size [bytes]", 8),
        (ALLREDUCE, 16777232, "Reduction operation", 16),
        (ALLGATHER, 18, "NCCL communicator ID", None),
        (ALLGATHER, 22, "Message size [bytes]", 8),
    ):
        file.put(
            "NVTX_PAYLOAD_SCHEMA_ENTRIES",
            domainId=1,
            schemaId=schema,
            idx=0,
            type=kind,
            name=label,
            offset=offset,
        )


def _process(file: _File, trace: RankTrace, pid: int, payloads: bool) -> None:
    process = (1 << 48) | (pid << 24)
    file.put("PROCESSES", globalPid=process, pid=pid, name="python3")
    categories = [trace.categories[i] for i in trace.category.tolist()]
    threads = {lane: process | (pid + i) for i, lane in enumerate(np.unique(trace.lane).tolist())}
    for row, category in enumerate(categories):
        times = {"start": file.at(int(trace.start_ns[row])), "end": file.at(int(trace.end_ns[row]))}
        on_device = {
            **times,
            "deviceId": max(0, int(trace.device[row])),
            "contextId": 1,
            "streamId": int(trace.stream[row]),
            "correlationId": max(0, int(trace.correlation[row])),
            "globalPid": process,
        }
        name = trace.name_of(row)
        if category == "kernel":
            short = file.string(re.sub(r"<.*|\(.*", "", name))
            full = file.string(name)
            file.put("CUPTI_ACTIVITY_KIND_KERNEL", **on_device, demangledName=full, shortName=short, gridX=1)
        elif category == "gpu_memcpy":
            file.put(
                "CUPTI_ACTIVITY_KIND_MEMCPY", **on_device, bytes=max(0, int(trace.bytes[row])), **_copy(name)
            )
        elif category == "gpu_memset":
            moved = max(0, int(trace.bytes[row]))
            file.put("CUPTI_ACTIVITY_KIND_MEMSET", **on_device, value=0, bytes=moved)
        elif category in ("cuda_runtime", "cuda_driver"):
            text = f"{name}_v7000" if category == "cuda_runtime" and name.startswith("cuda") else name
            file.put(
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                **times,
                eventClass=int(category == "cuda_driver"),
                globalTid=threads[int(trace.lane[row])],
                correlationId=max(0, int(trace.correlation[row])),
                nameId=file.string(text),
                returnValue=0,
            )
        elif category in ("cpu_op", "user_annotation"):
            _range(file, times, _emitted(trace, row, category), threads[int(trace.lane[row])])
    if payloads:
        _nccl(file, trace, threads)


def _range(
    file: _File, times, text: str, thread: int, registered: bool = False, data: bytes | None = None
) -> None:
    by_number = registered or file.schema == OLD
    file.put(
        "NVTX_EVENTS",
        **times,
        eventType=59,
        text=None if by_number else text,
        textId=file.string(text) if by_number else None,
        globalTid=thread,
        domainId=int(registered),
        binaryData=data,
    )


def _emitted(trace: RankTrace, row: int, category: str) -> str:
    """As ``emit_nvtx`` puts it: functions of the autograd engine, custom ones too, and operators that need gradients have a number."""
    name = trace.name_of(row)
    if category == "user_annotation" and row % 2:
        return name  # pushed by torch.cuda.nvtx
    custom = "::" not in name and not name.startswith(("detach", "record_param_comms"))
    numbered = category == "cpu_op" and (custom or (name.startswith("aten::") and row % 3))
    text = f"{name}{f', seq = {row}' if numbered else ''}, op_id = {row + 1}"
    shapes = int(trace.shapes[row])
    if category == "cpu_op" and shapes >= 0 and re.fullmatch(r"[\[\]0-9,-]+", trace.names[shapes]):
        text += f", sizes = {trace.names[shapes].replace(',', ', ')}"
    return text


def _copy(name: str) -> dict[str, int | None]:
    match = COPY.search(name)
    way = classify.memcpy_kind(name)
    kinds = dict.fromkeys(("srcKind", "dstKind"), 7)
    if match is not None:
        for column, told in zip(kinds, match.groups()[1:], strict=True):
            kinds[column] = MEMORIES.index(told) if told in MEMORIES else 7
    return {"copyKind": OPERATIONS[way][0] if way in OPERATIONS else 0, **kinds}


def _nccl(file: _File, trace: RankTrace, threads: dict[int, int]) -> None:
    """NCCL's ranges around the calls that launched its kernels, of those whose metadata the trace has."""
    made: set[int] = set()
    for _, _, call, call_name, schema, moved, group, size in described(trace):
        communicator = zlib.crc32(group.encode()) | 0xABCD_0000_0000
        thread = threads[int(trace.lane[call])]
        times = {"start": file.at(int(trace.start_ns[call])), "end": file.at(int(trace.end_ns[call]))}
        if communicator not in made and size == trace.meta.world_size and trace.meta.rank is not None:
            made.add(communicator)
            before = {"start": times["start"] - 10, "end": times["start"] - 5}
            init = struct.pack("<QII8x", communicator, size, trace.meta.rank)
            _range(file, before, "ncclCommInitRankConfig", thread, True, _payload(INIT, init))
        packed = struct.pack(
            "<QQi4x" if schema == ALLREDUCE else "<QQ", communicator, moved, *([0] * (schema == ALLREDUCE))
        )
        _range(file, times, call_name, thread, True, _payload(schema, packed))


def described(trace: RankTrace) -> Iterator[tuple[int, int, int, str, int, int, str, int]]:
    """(Kernel's row, its row in the collectives, that of the call that launched it, NCCL's call, schema, bytes as NCCL counts
    them, group, its size) of what has metadata and a call that was recorded."""
    calls = np.flatnonzero(trace.category_mask("cuda_runtime", "cuda_driver"))
    by_number = dict(zip(trace.correlation[calls].tolist(), calls.tolist(), strict=True))
    own = {int(event): i for i, event in enumerate(trace.collectives.event)}
    outer = {int(trace.external_id[event]): i for event, i in own.items() if trace.external_id[event] >= 0}
    kernels = np.flatnonzero(classify.communication_kernels(trace))
    for kernel in kernels.tolist():
        entry = own.get(kernel, outer.get(int(trace.external_id[kernel]), -1))
        call = by_number.get(int(trace.correlation[kernel]))
        if entry < 0 or call is None:
            continue
        table = trace.collectives
        operation = classify.communication_operation(trace.names[table.operation[entry]])
        dtype = trace.names[table.dtype[entry]].lower() if table.dtype[entry] >= 0 else ""
        if operation not in CALLS or dtype not in BYTES or table.group[entry] < 0:
            continue
        elements = (int(table.in_elements[entry]), int(table.out_elements[entry]))
        moved = (min if operation in ("allgather", "reducescatter") else max)(elements) * BYTES[dtype]
        name, schema = CALLS[operation]
        yield (
            kernel,
            entry,
            call,
            name,
            schema,
            max(0, moved),
            trace.names[table.group[entry]],
            int(table.group_size[entry]),
        )


def _payload(schema: int, content: bytes) -> bytes:
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, len(content), len(content) + 32) + content
