"""The step log's one schema: the names of fields in a rank's ``steps.jsonl`` and ``samples.jsonl``, and their names
in code.

The job's training thread writes these lines, so their names on disk are short. The value of each member is the name on
disk, the member's own name, in small letters, is what the reader calls it, with its unit. The writer
(:mod:`ddpdoctor.hook`) takes its keys from here when it is imported; the readers (:mod:`ddpdoctor.measure`,
:mod:`ddpdoctor.telemetry.live`) have their decoder rename by :func:`renamed`. ``docs/formats.md`` says the same to
those who read the files with something else.

With them, the phases in which a rank's training thread can be: names, groups, and words for reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class _Name(str, Enum):
    """A word on disk. In a text it is that word, in every version of Python."""

    def __str__(self) -> str:
        return str(self.value)

    @property
    def key(self) -> str:
        """As JSON has it before a value, with the quotes and the colon."""
        return f'"{self.value}":'

    @property
    def next_key(self) -> str:
        """The same behind another value."""
        return f',"{self.value}":'


class EventKind(_Name):
    """What happened in a step."""

    DATA = "data"
    """``next()`` of a DataLoader."""
    ITERATION = "iter"
    """Start of a pass over a DataLoader."""
    FORWARD = "fwd"
    """DDP's forward; where a backward is called inside it, what comes before each backward."""
    BROADCAST = "bcast"
    """DDP's broadcast of its buffers, before a forward."""
    EVALUATION = "eval"
    """Forwards without gradients: those of a step together."""
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
    """Events beyond the most that one step keeps, together."""

    @property
    def opening(self) -> str:
        """The field that says that an event is of this kind, in JSON: its first one."""
        return f'{EventField.KIND.key}"{self.value}"'


class EventField(_Name):
    """The fields of an event. Offsets are ns after the step's start."""

    KIND = "k"
    """An :class:`EventKind`."""
    START_NS = "s"
    """Offset of its start."""
    DURATION_NS = "d"
    WHERE = "w"
    """Number of the source line that the call came from."""
    LOADER = "l"
    """Number of the DataLoader in rank.json, as of ``MODULE`` and ``OPTIMIZER``."""
    COUNT = "n"
    """Samples of a batch; how many forwards, or further events, there were."""
    BATCHES_READY = "q"
    """Batches that workers had ready."""
    ASLEEP_NS = "z"
    """Of a loader without workers: how long, in this ``next()``, nothing of the process computed and the thread did not wait
    for a CPU either, as while storage answers. In a few steps a second."""
    EXHAUSTED = "end"
    """Whether the loader had no batch left: the pass is over."""
    MODULE = "m"
    """Number of the DDP module."""
    ELEMENTS = "e"
    """Elements of all tensors among the forward's inputs."""
    SYNCED = "sync"
    """Whether gradients were reduced in this backward."""
    FORWARD_END_NS = "base"
    """Offset of the end of the forward that this backward belongs to."""
    READY_NS = "ready"
    """For each bucket, how long after ``FORWARD_END_NS`` its last gradient was there."""
    ALSO = "also"
    """Of further DDP modules reduced in this backward, each ``MODULE``, ``SYNCED``, ``FORWARD_END_NS`` and ``READY_NS``."""
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
    """The fields of a line of ``calls.jsonl``, beside those of an event and ``LineField.STEP``."""

    OPEN = "open"
    """1 until the call has returned; of an asynchronous one for good."""
    NUMBER = "call"
    """Counted from the recording's begin."""
    TURN = "n"
    """The same among those of its process group: on all its ranks, what has the same number belongs together. Messages
    between two ranks have none."""
    LAST_TURN = "p"
    """``TURN`` of the same call, from the same line with as many bytes, the last time before; 0 if there was none."""
    TURN_BEFORE = "pp"
    """The same of the time before that."""
    DTYPE = "t"
    """Type of the tensor's elements, ``float32``."""


class Mark(_Name):
    """In the ``marks`` of a step: why it is not like the others."""

    OPENED = "profiler_open"
    """The first step of the profiler window: it includes opening the profiler."""
    PROFILED = "profiled"
    """A step of the window."""
    CLOSED = "profiler_close"
    """The step at whose start the profiler was closed, up to a second or more after the window."""
    SAVING = "profiler_save"
    """The trace was being written; or the window had ended, and kernels were still recorded."""
    USER_PROFILER = "user_profiler"
    """The job's own profiler was active."""


HELD_NS = 1_000_000
"""Nanoseconds. A thread that samples another one's stack waits for the GIL. After waiting so long, it sees where the
GIL was released, and not the code that held it; unless the holder was made to release it, which happens after 5 ms
(``sys.getswitchinterval``), inside that code."""


class LineField(_Name):
    """The fields of the lines: the first of each line says what line it is."""

    SCHEMA = "schema"
    """First line: ``ddpdoctor.steps/2``."""
    THINNED = "thinned"
    LEFT_OUT = "left_out"
    """Second and third line of a long log, see :mod:`.compaction`."""

    STEP = "step"
    """Line of a step: its number. With it ``TIME_NS``, and where its events were recorded, all that follows to ``MARKS``."""
    TIME_NS = "t"
    """Epoch ns. Of a step: a list of its start and its end."""
    THIN = "thin"
    """True: only the step's times were recorded."""
    CPU_NS = "cpu"
    """CPU time of the training thread; null where unknown."""
    RUN_DELAY_NS = "runq"
    """Time in which that thread could run but had no CPU; null where unknown."""
    EVENTS = "ev"
    MARKS = "marks"

    WHERE = "where"
    """Definition of a source line: its number. With it ``FILE``, ``LINE`` and ``FUNCTION``; before the number's first use."""
    CALLER = "by"
    """In a definition: the number of the line that called the function which this line is in. Who calls a line from two places
    has two numbers."""
    THROUGH = "through"
    """In a definition: lines of well-known packages between this line and torch, ``[file, line, function]`` each, the innermost
    first. Who comes to torch from a line in two ways has two numbers."""
    FILE = "file"
    LINE = "line"
    FUNCTION = "function"

    EVALUATED = "evaluated"
    """Number of a step in which all models of the job were in evaluation mode, and had not been before; by a look each second."""

    SAVED = "saved"
    """Number of a step in which a checkpoint was saved, written at once: the step's own line is lost if the rank ends within it."""

    DEVICE = "device"
    """Times of a step on its device: the step's number. With it ``DEVICE_START_NS`` and ``DEVICE_TIMES_NS``."""
    DEVICE_START_NS = "at"
    """When the step began, ns since the first step that was timed, on the device's own clock."""
    DEVICE_TIMES_NS = "times"
    """Pairs of a moment's name and ns after ``DEVICE_START_NS``."""

    NOTE = "note"
    """A sentence for readers of the log."""
    END = "end"
    """True: the process group was destroyed, or the process ended, at ``TIME_NS``."""
    SAMPLES = "s"
    """In ``samples.jsonl``: [ns after ``TIME_NS``, source line of the user's, innermost source line] of each. With it ``HELD``."""
    HELD = "h"
    """For how many ns each sample waited for the GIL; 0 below ``HELD_NS``."""
    CLOSER = "c"
    """Like ``SAMPLES``, of looks that were taken one after the other during about a step, of which only those are kept that had
    to wait so long. With it ``HELD`` and ``LOOKED_NS``."""
    LOOKED_NS = "n"
    """For how long the looks of ``CLOSER`` were taken."""


_BRIEF_LINE = f"{{{LineField.STEP.key}%d{LineField.TIME_NS.next_key}[%d,%d]{LineField.THIN.next_key}true}}\n"


def brief_lines(first: int, times_ns: Sequence[int]) -> str:
    """The lines of steps of which only the times are known, from the step ``first`` on; ``times_ns`` are start and end of each, epoch ns,
    in turn."""
    numbers: list[int] = []
    for index in range(0, len(times_ns), 2):
        numbers += first + index // 2, times_ns[index], times_ns[index + 1]
    return _BRIEF_LINE * (len(times_ns) // 2) % tuple(numbers)


class WorkerField(_Name):
    """The fields of the lines of ``workers.jsonl``, beside those of a definition of a source line, which ``PROCESS`` makes one of
    this process."""

    PROCESS = "pid"
    """Of the worker, in every line that it writes."""
    WORKER = "worker"
    """Line of what a worker did since its last one: its number. With it all that follows to ``HELD``."""
    WORKERS = "of"
    """How many workers the loader has."""
    SPAN_NS = "t"
    """Epoch ns of the begin and the end."""
    BATCHES = "n"
    """Batches that it prepared; its first one is not counted, here and in what follows."""
    PREPARING_NS = "d"
    """For how long it prepared batches."""
    SQUARES_MS2 = "q"
    """Sum of the squares of the batches' times, ms²."""
    CPU_NS = "cpu"
    """CPU time of its main thread in that time; null where unknown."""
    RUN_DELAY_NS = "runq"
    """For how long that thread could run but had no CPU; null where unknown."""
    SAMPLES = "s"
    """[ns after the begin, source line of the user's, innermost source line, 0 or 1: whether it slept] of each, while it
    prepared a batch."""
    HELD = "h"
    """As in ``samples.jsonl``."""

    LOADER = "loader"
    """Line of the rank, at the start of workers: the number of their loader. With it ``PROCESSES``."""
    PROCESSES = "pids"


def renamed(fields: type[_Name]) -> dict[str, str]:
    """Names on disk by the reader's names, for a decoder that renames."""
    return {field.name.lower(): field.value for field in fields}


class Phase(str, Enum):
    """The phase of the training thread: that of the innermost function on its stack which has one."""

    DATA = "data"
    """Waiting for, or preparing, a batch of a DataLoader."""
    FORWARD = "forward"
    EVALUATION = "evaluation"
    """Forwards without gradients."""
    BACKWARD = "backward"
    """With it the wait for the reduction of the gradients."""
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    """Called from Python, but for barriers."""
    BARRIER = "barrier"
    WAIT = "wait"
    """For an asynchronous collective."""
    SAVE = "save"
    LOAD = "load"
    RENDEZVOUS = "rendezvous"
    """Making a process group, or asking its store."""
    COMPILE = "compile"
    """``torch.compile`` at work."""
    DEBUGGER = "debugger"
    """A user debugs it with pdb, or it waits for input."""
    OTHER = "other"
    """Code of the user's, or of a library: the frames say which."""


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
"""As a table names them."""


def phase_words(name: object) -> str | None:
    """A phase as reports name it; None for none that is known."""
    try:
        return PHASE_WORDS[Phase(name)]
    except ValueError:
        return None


def waits_for_others(phase: object, groups: object) -> bool:
    """Whether a rank in ``phase`` waits for other ranks. ``groups``: by name of the process group, the numbers of its last collective that
    was enqueued, started and completed, -1 for none; not a dictionary if unknown."""
    return phase in WAITING_PHASES or (bool(groups_with_open(groups)) and phase not in OWN_PHASES)


def groups_with_open(groups: object) -> list[str]:
    """Names of the process groups of which a collective is enqueued and not complete."""
    return [name for name, numbers in groups.items() if _is_open(numbers)] if isinstance(groups, dict) else []


def _is_open(numbers: object) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) == 3
        and all(isinstance(number, int) for number in numbers)
        and bool(numbers[0] > max(numbers[2], 0))
    )
