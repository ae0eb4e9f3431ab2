"""Whether the job profiles itself: then its profile wins, and ours is never taken.

Opening a window while the job's own profiler is warming up makes the job crash later, and nothing tells that it is warming up.
So the construction of a profiler, at any time, rules our window out for good.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, List

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


def constructed(profiler: Any) -> None:
    """The job builds this one: whoever profiles gives way."""
    seen.append("the job's own " + type(profiler).__module__ + "." + type(profiler).__qualname__)
    for listener in list(listeners):
        listener()
