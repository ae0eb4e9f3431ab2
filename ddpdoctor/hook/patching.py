"""Wraps functions of torch: the original is always called, and the job gets what it returns or raises.

``torch.compile`` would trace a wrapper and crash on its operations, so the code of each is marked to be skipped, as
``torch._disable_dynamo(recursive=False)`` does it but without its import of ``torch._dynamo`` (a second, in jobs that
never compile).

Python runs the job's signal handlers between any two steps of the main thread, also inside the hook's code. An
exception of a handler is passed on to the job: a DataLoader's handler of SIGCHLD raises when a worker was killed, one
of SIGALRM when something takes too long.

A wrapper does not show in what the job prints: its line is removed from the traceback of an error that passes through
it, and a warning raised in the original is attributed to the original's caller.
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
"""``warnings.warn(stacklevel=2)`` names the caller's line and file. In counting frames it passes over those of the import
system, which it knows by these two words in the name of their file: the one way not to be counted.
"""


class Switch:
    """Whether wrappers of some kind of call record anything in the current step."""

    __slots__ = ("full",)

    def __init__(self, full: bool) -> None:
        self.full = full


always = Switch(True)


def _nothing(first: Any, second: Any) -> None:
    pass


def around(  # noqa: C901
    original: Callable[..., Any],
    part: Part,
    before: Before = _nothing,
    after: After = _nothing,
    seen: Switch = always,
    failed: Callable[[BaseException], None] | None = None,
) -> Callable[..., Any]:
    """A wrapper that calls ``before(args, kwargs) -> token``, ``original`` and ``after(token, result)``.

    ``after`` is not called if the token is None, or if ``seen.full`` was false when the call began: pass ``active`` for
    what is recorded only in steps recorded in full, which makes the others cheaper. ``after`` is also called if the
    original raises, with the exception as the result. ``failed`` gets that exception in any case, before the job does.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: C901
        token = None
        if seen.full and not part.off:
            try:
                token = before(args, kwargs)
            except Exception as error:
                if not counted(part, error):
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
                if not counted(part, error):
                    raise
            # Without the line of this wrapper, from Python 3.11 on: a bare raise goes on with what stands here.
            raised.__traceback__ = raised.__traceback__ and raised.__traceback__.tb_next
            raise
        if token is None:
            return result
        try:
            after(token, result)
        except Exception as error:
            if not counted(part, error):
                raise
        return result

    not_counted(wrapper)
    not_compiled(wrapper)
    return wrapper


def not_counted(function: Any) -> None:
    """Have ``warnings`` skip ``function`` when it counts frames."""
    function.__code__ = _uncounted(function.__code__)


@functools.cache
def _uncounted(code: types.CodeType) -> types.CodeType:
    return code.replace(co_filename=UNCOUNTED_FILE)


def guarded(part: Part, function: Callable[..., None], seen: Switch = always) -> Callable[..., None]:
    """``function`` as a callback that never raises and always returns None; ``seen`` as for ``around``."""

    def callback(*args: Any, **kwargs: Any) -> None:
        if seen.full and not part.off:
            try:
                function(*args, **kwargs)
            except Exception as error:
                if not counted(part, error):
                    raise

    not_compiled(callback)
    return callback


def counted(part: Part, error: BaseException) -> bool:
    """Count ``error``, which was caught, as a failure of ``part``; False if a signal handler of the job raised it,
    which must be raised again."""
    if is_the_jobs(error):
        return False
    try:
        part.failed(error)
    except Exception:
        part.off = True
    return True


def not_compiled(function: Any) -> None:
    """Have ``torch.compile`` run ``function`` as it is, while what it calls is compiled as before."""
    _skip(function.__code__)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_recursive = False
    function._torchdynamo_disable_msg = None


def skip_module(module: types.ModuleType) -> None:
    """Mark all code of a module of the hook, so that ``torch.compile`` skips its frames when the job calls into
    them."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if type(function) is types.FunctionType:
                for code in _codes(function.__code__):
                    _skip(code)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _codes(constant)


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
    """The closure cell ``func`` of a function decorated by torch, which contains the wrapped function; None without
    one.

    Replacing its content changes every reference to the decorated function, also one that was imported by name earlier.
    """
    if type(function) is not types.FunctionType or not function.__closure__:
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index("func")] if "func" in names else None


class Patches:
    """The changes made to torch. They can be undone: the benchmark does so between its blocks of steps."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._redo: list[Callable[[], None]] = []
        self._made = True

    def add(self, do: Callable[[], None], undo: Callable[[], None]) -> None:
        """Make a change that ``undo`` takes back."""
        do()
        self._redo.append(do)
        self._undo.append(undo)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class."""
        old = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        self.add(lambda: setattr(owner, name, value), lambda: setattr(owner, name, old))

    def cell(self, cell: Any, value: Any) -> None:
        """Replace what a closure cell holds."""
        old = cell.cell_contents
        self.add(lambda: setattr(cell, "cell_contents", value), lambda: setattr(cell, "cell_contents", old))

    def suspend(self) -> None:
        """Undo all changes."""
        if self._made:
            self._made = False
            for undo in reversed(self._undo):
                undo()

    def resume(self) -> None:
        """Make them again."""
        if not self._made:
            self._made = True
            for do in self._redo:
                do()


torch_patches = Patches()
"""All changes made in this process."""


def is_the_jobs(error: BaseException) -> bool:
    """Whether a signal handler raised ``error``; its traceback then begins there, without our lines."""
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
    """The code of all handlers of this process."""
    codes = set()
    for number in signal.valid_signals():
        code = _code_of(signal.getsignal(number))
        if code is not None:
            codes.add(code)
    return codes


def _code_of(handler: Any) -> CodeType | None:
    """Of a function, a method, a partial, or an object that is called."""
    for _ in range(4):
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            return code
        inner = getattr(handler, "__func__", None) or getattr(handler, "func", None)
        handler = inner if inner is not None else getattr(type(handler), "__call__", None)
    return None
