"""Differences between the Python versions on which the tests run."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from ddpdoctor.hook.profiling import can_be_read

NEEDS_STACKS = pytest.mark.skipif(
    not can_be_read(),
    reason="Python 3.11.0 to 3.11.4 may deadlock when asked for the stacks of other threads",
)
"""Mark of tests that need lines from stack samples, or the phase of a long step."""


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive of this repository. Python 3.11.0 to 3.11.3 have no filters."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)
