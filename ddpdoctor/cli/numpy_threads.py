"""NumPy as the commands need it: without the threads of its linear algebra."""

from __future__ import annotations

import os

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def import_numpy_single_threaded() -> None:
    """Import NumPy before anything else does.

    Its linear algebra starts a thread for each processor when it is loaded, and each spins for a while before it sleeps: with two
    processors that takes 0.1 CPU seconds, as long as NumPy's import itself, for threads that an analysis never uses. Only the
    command line's own process may do without them, not a script that imports ddpdoctor; and the variable is gone
    before a job is started, which would inherit it.
    """
    added = {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import numpy  # noqa: F401
    finally:
        for name in added:
            del os.environ[name]
