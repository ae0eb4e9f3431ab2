"""Answers of the analysis to a case, without what depends on the run, machine or version; and the differences of two answers."""

from __future__ import annotations

import json
import lzma
import math
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.json_output import to_json

from .cases import GROUPS

FROZEN = Path(__file__).parent / "frozen"
DIGITS = 9
INPUT = "{input}"
"""Replaces the analysed path."""


def answer(group: str, name: str) -> dict[str, Any]:
    """``diagnosis.json`` of a case, or ``{"error": sentence}`` if the analysis refuses it.

    Without the version of ddpdoctor, the time of the analysis, the folder in the repository, and how the job ended, which only the
    machine on which it ran can tell. The analysed path is replaced wherever it occurs. All else is kept, including recorded hosts,
    times and paths.
    """
    with tempfile.TemporaryDirectory(prefix="net") as folder:
        place = GROUPS[group].make(name, Path(folder))
        try:
            diagnosis = analyze(str(place), Options(cache=False, jobs=1))
        except DdpDoctorError as error:
            return {"error": str(error).replace(str(place), INPUT)}
    document = json.loads(to_json(diagnosis))
    del document["tool_version"], document["created_ns"]
    document["job"]["versions"].pop("ddpdoctor", None)
    document["job"].pop("folder_in_repository")
    document["job"].pop("end")
    return _normalised(document, str(place))


def answer_or_crash(group: str, name: str) -> dict[str, Any]:
    """Like :func:`answer`, or ``{"crash": traceback}`` if the analysis crashes. Crashes are never frozen."""
    try:
        return answer(group, name)
    except Exception:
        return {"crash": traceback.format_exc()}


def _normalised(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {key: _normalised(item, place) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalised(item, place) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value.replace(place, INPUT) if isinstance(value, str) else value


def frozen(group: str) -> dict[str, Any]:
    """The frozen answers of a group by case; {} if nothing was frozen."""
    file = _file(group)
    if not file.exists():
        return {}
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return dict(json.loads(line) for line in lines)


def freeze(group: str, answers: dict[str, Any]) -> Path:
    """Write the answers of a group, one case per line. Returns the file."""
    file = _file(group)
    file.parent.mkdir(exist_ok=True)
    compact = {"separators": (",", ":"), "ensure_ascii": False}
    lines = [json.dumps([name, answers[name]], **compact) for name in sorted(answers)]
    file.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode(), preset=9))
    return file


def _file(group: str) -> Path:
    return FROZEN / f"{group}.jsonl.xz"


RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Tolerances of floats, because a sum in another order is rounded differently. All else is compared exactly."""
NOTHING = "(nothing)"
MAX_LENGTH = 160


@dataclass(frozen=True)
class Difference:
    """A difference at one place of a document. ``path``: such as ``findings[0].where[1].line``; empty for the whole document."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path or 'all of it'}: {_shortened(self.old)} → {_shortened(self.new)}"


def differences(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """Yields all differences between ``old`` and ``new``. :data:`NOTHING` represents a value that one of them lacks."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{path}.{key}" if path else key
            yield from differences(old.get(key, NOTHING), new.get(key, NOTHING), inner)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield Difference(f"{path}.length", len(old), len(new))
        for number in range(max(len(old), len(new))):
            pair = [side[number] if number < len(side) else NOTHING for side in (old, new)]
            yield from differences(*pair, f"{path}[{number}]")
    elif not _is_same(old, new):
        yield Difference(path, old, new)


def _is_same(old: Any, new: Any) -> bool:
    if type(old) is float and type(new) is float:
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(old) is type(new) and old == new


def _shortened(value: Any) -> str:
    text = value if value is NOTHING else repr(value)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}…"
