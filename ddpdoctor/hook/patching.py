"""Wraps functions of torch. The original is always called, and the job gets its result or exception.

``torch.compile`` would trace a wrapper and crash on its operations, so each wrapper's code is marked to be skipped.
``torch._disable_dynamo(recursive=False)`` does the same but imports ``torch._dynamo``, which takes a second.

Python may run the job's signal handlers at any bytecode of the main thread, also inside the hook's code. An exception raised by a
handler is passed on to the job. Examples: a DataLoader's SIGCHLD handler raises when a worker was killed, a SIGALRM handler raises
at a timeout.

A wrapper is not visible in the job's output: its line is removed from the tracebacks of exceptions that pass through it, and a
warning raised in the original is attributed to the original's caller.
"""

from __future__ import annotations

import functools
import signal
import threading
import types
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any, Callable

from .guard import Part

Before = Callable[[Any, Any], Any]
After = Callable[[Any, Any], None]

UNCOUNTED_FILE = "<ddpdoctor, like importlib._bootstrap>"
"""``warnings.warn(stacklevel=2)`` skips frames of the import system when it counts frames. It recognizes them by the two words
"importlib" and "_bootstrap" in the file name; there is no other way to be skipped."""


class Switch:
    """Tells wrappers of one kind of call whether to record anything in the current step."""

    __slots__ = ("full",)

    def __init__(self, full: bool) -> None:
        self.full = full


always_on = Switch(True)


def _no_op(first: Any, second: Any) -> None:
    pass


def around(  # noqa: C901
    original: Callable[..., Any],
    part: Part,
    before: Before = _no_op,
    after: After = _no_op,
    switch: Switch = always_on,
    failed: Callable[[BaseException], None] | None = None,
) -> Callable[..., Any]:
    """Return a wrapper that calls ``before(args, kwargs) -> token``, ``original`` and ``after(token, result)``.

    ``after`` is skipped if the token is None or if ``switch.full`` was false when the call began. Pass ``active`` as ``switch`` for
    calls that are recorded only in full steps; the wrapper then costs less in the other steps. If the original raises, ``after``
    gets the exception as the result. ``failed`` always gets that exception, before the job does.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: C901
        token = None
        if switch.full and not part.off:
            try:
                token = before(args, kwargs)
            except Exception as error:
                if not count_failure(part, error):
                    raise
        try:
            result = original(*args, **kwargs)
        except BaseException as raised:
            try:
                if token is not None:
                    after(token, raised)
                if failed is not None and not part.off:
                    failed(raised)
            except Exception as error:
                if not count_failure(part, error):
                    raise
            # Remove this wrapper's line from the traceback. From Python 3.11 on, a bare raise keeps the changed
            # traceback.
            raised.__traceback__ = raised.__traceback__ and raised.__traceback__.tb_next
            raise
        if token is None:
            return result
        try:
            after(token, result)
        except Exception as error:
            if not count_failure(part, error):
                raise
        return result

    hide_from_warnings(wrapper)
    exclude_from_compile(wrapper)
    return wrapper


def hide_from_warnings(function: Any) -> None:
    """Make ``warnings`` skip ``function`` when it counts frames."""
    function.__code__ = _code_hidden_from_warnings(function.__code__)


@functools.cache
def _code_hidden_from_warnings(code: types.CodeType) -> types.CodeType:
    return code.replace(co_filename=UNCOUNTED_FILE)


def guarded(part: Part, function: Callable[..., None], switch: Switch = always_on) -> Callable[..., None]:
    """Return ``function`` as a callback that returns None and raises only exceptions of the job's signal handlers. ``switch`` as
    for ``around``."""

    def callback(*args: Any, **kwargs: Any) -> None:
        if switch.full and not part.off:
            try:
                function(*args, **kwargs)
            except Exception as error:
                if not count_failure(part, error):
                    raise

    exclude_from_compile(callback)
    return callback


def count_failure(part: Part, error: BaseException) -> bool:
    """Count the caught ``error`` as a failure of ``part``. Returns False if a signal handler of the job raised it; the caller must
    then raise it again."""
    if is_from_job_handler(error):
        return False
    try:
        part.failed(error)
    except Exception:
        part.off = True
    return True


def exclude_from_compile(function: Any) -> None:
    """Make ``torch.compile`` run ``function`` uncompiled; the functions it calls are still compiled."""
    _skip(function.__code__)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_recursive = False
    function._torchdynamo_disable_msg = None


def skip_module(module: types.ModuleType) -> None:
    """Mark all code of a module of the hook, so that ``torch.compile`` skips its frames."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if type(function) is types.FunctionType:
                for code in nested_codes(function.__code__):
                    _skip(code)


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """``code`` and the code of all functions defined in it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from nested_codes(constant)


def _skip(code: types.CodeType) -> None:
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return
    skip = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        skip(code)
        return
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))


def cell_of(function: Any) -> Any | None:
    """Return the closure cell ``func`` of a function decorated by torch, which holds the wrapped function; None if there is none.
    Replacing its content changes every reference to the decorated function, including names imported earlier."""
    if type(function) is not types.FunctionType or not function.__closure__:
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index("func")] if "func" in names else None


class Patches:
    """The changes made to torch. The benchmark undoes and redoes them between its blocks of steps."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._redo: list[Callable[[], None]] = []
        self._applied = True

    def add(self, do: Callable[[], None], undo: Callable[[], None]) -> None:
        """Make a change; ``undo`` reverts it."""
        do()
        self._redo.append(do)
        self._undo.append(undo)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class."""
        old = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        self.add(lambda: setattr(owner, name, value), lambda: setattr(owner, name, old))

    def cell(self, cell: Any, value: Any) -> None:
        """Replace the content of a closure cell."""
        old = cell.cell_contents
        self.add(lambda: setattr(cell, "cell_contents", value), lambda: setattr(cell, "cell_contents", old))

    def suspend(self) -> None:
        """Undo all changes, in reverse order."""
        if self._applied:
            self._applied = False
            for undo in reversed(self._undo):
                undo()

    def resume(self) -> None:
        """Redo all changes."""
        if not self._applied:
            self._applied = True
            for do in self._redo:
                do()


torch_patches = Patches()
"""All changes made in this process."""


def is_from_job_handler(error: BaseException) -> bool:
    """Whether a signal handler raised ``error``. If so, the hook's lines are removed from its traceback."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = _handlers()
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            error.__traceback__ = trace
            return True
        trace = trace.tb_next
    return False


def _handlers() -> set[CodeType]:
    codes = set()
    for number in signal.valid_signals():
        code = _code_of(signal.getsignal(number))
        if code is not None:
            codes.add(code)
    return codes


def _code_of(handler: Any) -> CodeType | None:
    """The code of a function, method, partial or callable object; None for ``signal.SIG_DFL`` and the like."""
    if isinstance(handler, int):
        return None
    for _ in range(4):
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            return code
        inner = getattr(handler, "__func__", None) or getattr(handler, "func", None)
        handler = inner if inner is not None else getattr(type(handler), "__call__", None)
    return None
