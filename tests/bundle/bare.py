"""A Python that has torch and what torch itself needs, as an image has it, and nothing of ddpdoctor's."""

from __future__ import annotations

import importlib.metadata
import re
import venv
from pathlib import Path

OURS = ("click", "rich", "msgspec", "yaml", "numpy", "polars", "cel", "psutil", "pynvml", "ddpdoctor")
"""What ddpdoctor needs, and such an image lacks."""


def bare_python(folder: Path, *packages: str) -> str:
    """An interpreter in ``folder`` with ``packages`` of this environment and what they need, but for ``OURS``."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in _needed(packages):
        for place in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if place.partition(".")[0] not in OURS and place != "__pycache__":
                (site / place).symlink_to(str(distribution.locate_file(place)))
    return str(folder / "bin" / "python")


def _needed(packages: tuple[str, ...]) -> list[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(packages)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        wanted = [line for line in found[name].requires or () if "extra ==" not in line]
        waiting += [re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0] for line in wanted]
    return list(found.values())
