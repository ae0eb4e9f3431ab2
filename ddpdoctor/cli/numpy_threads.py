"""Import of NumPy without the threads of its linear algebra."""

from __future__ import annotations

import os

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def import_numpy_single_threaded() -> None:
    """Import NumPy with one thread for linear algebra, before another module imports it.

    OpenBLAS starts a thread per processor when it is loaded, and each spins before it sleeps: with two processors 0.1 CPU seconds, as
    long as NumPy's import itself, for threads that the analysis never uses. Only the command line does this, not a script that
    imports ddpdoctor. The variable is removed again, because a job would inherit it.
    """
    added = {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import numpy  # noqa: F401
    finally:
        for name in added:
            del os.environ[name]
