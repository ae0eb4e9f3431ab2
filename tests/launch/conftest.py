"""What the tests of this folder share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .launched import spools_below


@pytest.fixture
def no_spool_stays(tmp_path: Path) -> Iterator[None]:
    """What a test leaves in memory-backed storage for run directories below ``tmp_path`` goes."""
    yield
    for root in {spool.parent for spool in spools_below(tmp_path)}:
        shutil.rmtree(root)
