"""The schema of the step log: names of the fields in a rank's ``steps.jsonl`` and ``samples.jsonl``, and their names in code.

The job's training thread writes these lines, so the names on disk are short. The value of each member is the name on disk. The
member's own name in lower case, with its unit, is the name in the readers. The writer (:mod:`ddpdoctor.hook`) takes its keys from
here. The decoders of the readers (:mod:`ddpdoctor.measure`, :mod:`ddpdoctor.telemetry.live`) rename with :func:`renamed`.
``docs/formats.md`` documents the same fields for other readers.

Also the phases of a rank's training thread: names, groups, and words for reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class _Name(str, Enum):
    """A name on disk. ``str()`` gives that name in every version of Python."""

    def __str__(self) -> str:
        return str(self.value)

    @property
    def key(self) -> str:
        """The JSON key: quoted name and colon."""
        return f'"{self.value}":'

    @property
    def next_key(self) -> str:
        """The JSON key with a comma before it."""
        return f',"{self.value}":'


class EventKind(_Name):
    """What happened in a step."""

    DATA = "data"
    """``next()`` of a DataLoader."""
    ITERATION = "iter"
    """Start of a pass over a DataLoader."""
    FORWARD = "fwd"
    """DDP's forward; if backwards are called inside it, the part before each backward."""
    BROADCAST = "bcast"
    """DDP's broadcast of its buffers, before a forward."""
    EVALUATION = "eval"
    """Forwards without gradients, all of a step together."""
    BACKWARD = "bwd"
    """``backward()``."""
    OPTIMIZER = "opt"
    """An optimizer's step."""
    COLLECTIVE = "coll"
    """A collective called from Python."""
    BARRIER = "bar"
    """A barrier called from Python."""
    WAIT = "wait"
    """Waiting for an asynchronous collective."""
    COLLECTION = "gc"
    """Python's garbage collection."""
    SAVE = "save"
    """Writing of a checkpoint."""
    LOAD = "load"
    """Reading of a checkpoint."""
    MORE = "more"
    """Events of a step beyond the limit, together."""

    @property
    def opening(self) -> str:
        """The first field of an event of this kind, as JSON."""
        return f'{EventField.KIND.key}"{self.value}"'


POINT_TO_POINT = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
)
"""Names of torch's point-to-point messages. Ranks that are not involved call nothing, so these are not counted as calls of the group."""


class EventField(_Name):
    """The fields of an event. Offsets are ns from the step's start."""

    KIND = "k"
    """An :class:`EventKind`."""
    START_NS = "s"
    """Offset of its start."""
    DURATION_NS = "d"
    WHERE = "w"
    """Number of the calling source line."""
    LOADER = "l"
    """Number of the DataLoader in rank.json; likewise ``MODULE`` and ``OPTIMIZER``."""
    COUNT = "n"
    """Samples of a batch; number of forwards or of further events."""
    BATCHES_READY = "q"
    """Number of batches that workers had ready."""
    ASLEEP_NS = "z"
    """For a loader without workers: ns of this ``next()`` in which nothing of the process computed and the thread did not wait for
    a CPU, for example while waiting for storage. In a few steps per second."""
    EXHAUSTED = "end"
    """Whether the loader had no batch left."""
    MODULE = "m"
    """Number of the DDP module."""
    ELEMENTS = "e"
    """Number of elements of all tensors in the forward's inputs."""
    SYNCED = "sync"
    """Whether gradients were reduced in this backward."""
    FORWARD_END_NS = "base"
    """Offset of the end of the forward of this backward."""
    READY_NS = "ready"
    """For each bucket: ns from ``FORWARD_END_NS`` until its last gradient was ready."""
    ALSO = "also"
    """For each further DDP module reduced in this backward: ``MODULE``, ``SYNCED``, ``FORWARD_END_NS`` and ``READY_NS``."""
    OPTIMIZER = "o"
    """Number of the optimizer."""
    OPERATION = "op"
    """Name of the function in torch.distributed."""
    GROUP = "pg"
    """Name of the process group."""
    MESSAGE_BYTES = "b"
    IS_ASYNC = "async"
    """Whether it was called with ``async_op=True``."""
    SOURCE = "src"
    """Rank that sends."""
    DESTINATION = "dst"
    """Rank that receives."""


class CallField(_Name):
    """The fields of a line of ``calls.jsonl``, in addition to those of an event and ``LineField.STEP``."""

    OPEN = "open"
    """1 until the call has returned; always 1 for an asynchronous call."""
    NUMBER = "call"
    """Number of the call since the start of the recording."""
    TURN = "n"
    """Number of the call within its process group. The calls of its ranks with the same number belong together. Point-to-point
    messages have none."""
    LAST_TURN = "p"
    """``TURN`` of the previous call from the same line with as many bytes; 0 if there was none."""
    TURN_BEFORE = "pp"
    """``TURN`` of the one before that."""
    DTYPE = "t"
    """Type of the tensor's elements, such as ``float32``."""


class Mark(_Name):
    """Marks of a step: the reasons why it differs from others."""

    OPENED = "profiler_open"
    """The first step of the profiler window: it includes opening the profiler."""
    PROFILED = "profiled"
    """A step of the window."""
    CLOSED = "profiler_close"
    """The step at whose start the profiler was closed, up to a second or more after the window."""
    SAVING = "profiler_save"
    """The trace was being written, or the window had ended but kernels were still recorded."""
    USER_PROFILER = "user_profiler"
    """The job's own profiler was active."""


HELD_NS = 1_000_000
"""ns. A thread that samples another thread waits for the GIL. If it waits at least this long, it sees where the GIL was released,
not the code that held it, unless the holder was forced to release it within that code, which happens after 5 ms
(``sys.getswitchinterval``)."""


class LineField(_Name):
    """The fields of the lines. The first field of a line determines its kind."""

    SCHEMA = "schema"
    """First line: ``ddpdoctor.steps/2``."""
    THINNED = "thinned"
    LEFT_OUT = "left_out"
    """Second and third line of a thinned log; see :mod:`.compaction`."""

    STEP = "step"
    """Line of a step: its number. With ``TIME_NS`` and, if its events were recorded, the fields up to ``MARKS``."""
    TIME_NS = "t"
    """Epoch ns. For a step: a list of its start and end."""
    THIN = "thin"
    """True: only the step's times were recorded."""
    CPU_NS = "cpu"
    """CPU time of the training thread, ns; null if unknown."""
    RUN_DELAY_NS = "runq"
    """Time in which that thread was runnable without a CPU, ns; null if unknown."""
    EVENTS = "ev"
    MARKS = "marks"

    WHERE = "where"
    """Definition of a source line: its number. With ``FILE``, ``LINE`` and ``FUNCTION``. Written before the number's first use."""
    CALLER = "by"
    """In a definition: number of the line that called this line's function. A line called from two places has two numbers."""
    THROUGH = "through"
    """In a definition: lines of well-known packages between this line and torch, each ``[file, line, function]``, innermost first.
    A line that reaches torch in two ways has two numbers."""
    FILE = "file"
    LINE = "line"
    FUNCTION = "function"

    EVALUATED = "evaluated"
    """Number of a step in which all models of the job were found in evaluation mode, and had not been before; checked once a
    second."""

    SAVED = "saved"
    """Number of a step in which a checkpoint was saved. Written at once, because the step's own line is lost if the rank ends in
    it."""

    DEVICE = "device"
    """Times of a step on its device: the step's number. With ``DEVICE_START_NS`` and ``DEVICE_TIMES_NS``."""
    DEVICE_START_NS = "at"
    """Start of the step on the device's clock, ns since the first timed step."""
    DEVICE_TIMES_NS = "times"
    """Pairs of an event's name and its time, ns after ``DEVICE_START_NS``."""

    NOTE = "note"
    """A sentence for readers of the log."""
    END = "end"
    """True: the process group was destroyed, or the process ended, at ``TIME_NS``."""
    SAMPLES = "s"
    """In ``samples.jsonl``: [ns after ``TIME_NS``, user's source line, innermost source line] of each sample. With ``HELD``."""
    HELD = "h"
    """ns that each sample waited for the GIL; 0 below ``HELD_NS``."""
    CLOSER = "c"
    """Like ``SAMPLES``, for successive attempts during about one step, of which only those are kept that waited that long. With
    ``HELD`` and ``LOOKED_NS``."""
    LOOKED_NS = "n"
    """Duration of the attempts of ``CLOSER``, ns."""


_BRIEF_LINE = f"{{{LineField.STEP.key}%d{LineField.TIME_NS.next_key}[%d,%d]{LineField.THIN.next_key}true}}\n"


def brief_lines(first: int, times_ns: Sequence[int]) -> str:
    """The lines of steps of which only the times are known, from the step ``first`` on. ``times_ns``: start and end of each, epoch
    ns, alternating."""
    count = len(times_ns) // 2
    numbers = [0] * (3 * count)
    numbers[::3], numbers[1::3], numbers[2::3] = range(first, first + count), times_ns[::2], times_ns[1::2]
    return _BRIEF_LINE * count % tuple(numbers)


class WorkerField(_Name):
    """The fields of the lines of ``workers.jsonl``, in addition to those of a source line's definition, to which ``PROCESS`` is
    added."""

    PROCESS = "pid"
    """Process id of the worker, in every line that it writes."""
    WORKER = "worker"
    """Line of a worker's work since its last one: its number. With the fields up to ``HELD``."""
    WORKERS = "of"
    """Number of workers of the loader."""
    SPAN_NS = "t"
    """Epoch ns of the begin and the end."""
    BATCHES = "n"
    """Number of batches prepared. Its first batch is not counted, here and below."""
    PREPARING_NS = "d"
    """Time spent preparing batches, ns."""
    SQUARES_MS2 = "q"
    """Sum of the squares of the batches' times, ms²."""
    BYTES = "b"
    """Bytes of the memory behind the batches' tensors, which pass through shared memory; null if unknown."""
    CPU_NS = "cpu"
    """CPU time of its main thread in the span, ns; null if unknown."""
    RUN_DELAY_NS = "runq"
    """Time in which that thread was runnable without a CPU, ns; null if unknown."""
    SAMPLES = "s"
    """[ns after the begin, user's source line, innermost source line, 1 if it slept, otherwise 0] of each sample taken while it
    prepared a batch."""
    HELD = "h"
    """As in ``samples.jsonl``."""

    LOADER = "loader"
    """Line written by the rank at the start of workers: the number of their loader. With ``PROCESSES``."""
    PROCESSES = "pids"


def renamed(fields: type[_Name]) -> dict[str, str]:
    """Names on disk by the readers' names, for a decoder."""
    return {field.name.lower(): field.value for field in fields}


class Phase(str, Enum):
    """The phase of the training thread, from the innermost function on its stack that has one."""

    DATA = "data"
    """Waiting for, or preparing, a batch of a DataLoader."""
    FORWARD = "forward"
    EVALUATION = "evaluation"
    """Forwards without gradients."""
    BACKWARD = "backward"
    """Includes the wait for the reduction of the gradients."""
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    """A collective called from Python, except barriers."""
    BARRIER = "barrier"
    WAIT = "wait"
    """Waiting for an asynchronous collective."""
    SAVE = "save"
    LOAD = "load"
    RENDEZVOUS = "rendezvous"
    """Creating a process group, or accessing its store."""
    COMPILE = "compile"
    """Compilation by ``torch.compile``."""
    DEBUGGER = "debugger"
    """A debugger, such as pdb, waits for the user."""
    OTHER = "other"
    """Code of the user or of a library; see the frames."""


WAITING_PHASES = frozenset((Phase.COLLECTIVE, Phase.BARRIER, Phase.WAIT, Phase.RENDEZVOUS))
"""Phases in which a rank always waits for others."""
LONG_PHASES = frozenset((Phase.EVALUATION, Phase.SAVE, Phase.LOAD, Phase.COMPILE))
"""Phases that take as long as many steps in healthy jobs, without any sign of progress."""
OWN_PHASES = LONG_PHASES | {Phase.DATA}
"""Phases of a rank's own work, in which it does not wait for others even if it has collectives in flight."""
PHASE_WORDS = {
    Phase.DATA: "waiting for data",
    Phase.FORWARD: "forward",
    Phase.EVALUATION: "evaluation",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.COLLECTIVE: "a collective",
    Phase.BARRIER: "a barrier",
    Phase.WAIT: "waiting for a collective",
    Phase.SAVE: "writing a checkpoint",
    Phase.LOAD: "reading a checkpoint",
    Phase.RENDEZVOUS: "creating a process group",
    Phase.COMPILE: "torch.compile",
    Phase.DEBUGGER: "a debugger",
    Phase.OTHER: "other code",
}
"""Names of phases in tables."""


def phase_words(name: object) -> str | None:
    """The name of a phase in reports; None if unknown."""
    try:
        return PHASE_WORDS[Phase(name)]
    except ValueError:
        return None


def waits_for_others(phase: object, groups: object) -> bool:
    """Whether a rank in ``phase`` waits for other ranks. ``groups``: by process group, the numbers of its last collective enqueued,
    started and completed, -1 for none; not a dictionary if unknown."""
    return phase in WAITING_PHASES or (bool(groups_with_open(groups)) and phase not in OWN_PHASES)


def groups_with_open(groups: object) -> list[str]:
    """Names of the process groups with a collective that is enqueued and not complete."""
    return [name for name, numbers in groups.items() if _is_open(numbers)] if isinstance(groups, dict) else []


def _is_open(numbers: object) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) == 3
        and all(isinstance(number, int) for number in numbers)
        and bool(numbers[0] > max(numbers[2], 0))
    )
