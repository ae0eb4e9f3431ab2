"""Whether the job profiles itself: then its profile wins, and ours is never taken.

Opening a window while the job's own profiler is warming up makes the job crash later, and nothing tells that
it is warming up.
So the construction of a profiler, at any time, rules our window out for good.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, List

from .guard import part
from .patching import Patches, around

_PART = part("detection of other profilers")
_CLASSES = {
    "torch.profiler.profiler": ("_KinetoProfile",),
    "torch.autograd.profiler": ("profile", "emit_nvtx", "emit_itt"),
}
_TOOLS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute",
}

seen: List[str] = []
"""What profiles this process besides us."""
listeners: List[Callable[[], None]] = []
"""Called when the job constructs a profiler."""


def other_tool() -> str:
    """The name of a profiler that this process runs under, or is about to use; "" where there is none. Call on the
    training thread.
    """
    for variable, name in _TOOLS.items():
        if os.environ.get(variable):
            return name
    return seen[0] if seen else _python_profiler()


def _python_profiler() -> str:
    """A profiler of Python calls, such as cProfile, that is on: the window would slow down what it measures."""
    monitoring = getattr(sys, "monitoring", None)
    tool = monitoring.get_tool(monitoring.PROFILER_ID) if monitoring is not None else None
    if tool or sys.getprofile() is not None:
        return str(tool or "cProfile, or another profiler of Python calls,")
    return ""


def _before(args: Any, kwargs: Any) -> None:
    seen.append("the job's own " + type(args[0]).__module__ + "." + type(args[0]).__qualname__)
    for listener in list(listeners):
        listener()


def _after(token: Any, result: Any) -> None:
    pass


def install(patches: Patches) -> None:
    """Watch the constructors."""
    import importlib

    for module_name, names in _CLASSES.items():
        module = importlib.import_module(module_name)
        for name in names:
            owner = vars(module).get(name)
            if owner is not None:
                patches.attribute(owner, "__init__", around(owner.__init__, _PART, _before, _after))
