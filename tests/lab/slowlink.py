"""A slow link between two hosts: network namespaces with a real rate limit."""
from __future__ import annotations
from pathlib import Path
from .trial import Outcome


def slow_link_outcome(folder: Path, seed: int) -> list[Outcome]:
    return []
