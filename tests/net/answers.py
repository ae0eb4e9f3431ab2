"""What the analysis says of a case, without what another run, machine or version would say otherwise."""

from __future__ import annotations

import json
import lzma
import tempfile
import traceback
from pathlib import Path
from typing import Any

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.json_output import to_json

from .cases import GROUPS

FROZEN = Path(__file__).parent / "frozen"
DIGITS = 9
INPUT = "{input}"
"""Stands for the path that was analysed."""


def answer(group: str, name: str) -> dict[str, Any]:
    """``diagnosis.json`` of a case, or ``{"error": sentence}`` where the analysis refuses it.

    Left out are the version of ddpdoctor, the time of the analysis, where this machine has a repository, and whether the job's
    processes are known to be gone, which only the machine where it ran knows; the path that was analysed is replaced wherever it occurs.
    All else stays, among it hosts, times and paths that were recorded.
    """
    with tempfile.TemporaryDirectory(prefix="net") as folder:
        place = GROUPS[group].lay_out(name, Path(folder))
        try:
            diagnosis = analyze(str(place), Options(cache=False, jobs=1))
        except DdpDoctorError as error:
            return {"error": str(error).replace(str(place), INPUT)}
    document = json.loads(to_json(diagnosis))
    del document["tool_version"], document["created_ns"]
    document["job"]["versions"].pop("ddpdoctor", None)
    document["job"].pop("folder_in_repository")
    document["job"].pop("end")
    return _plain(document, str(place))


def answer_or_crash(group: str, name: str) -> dict[str, Any]:
    """The same; a crash of the analysis is an answer as well, which is never frozen."""
    try:
        return answer(group, name)
    except Exception:
        return {"crash": traceback.format_exc()}


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item, place) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, place) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value.replace(place, INPUT) if isinstance(value, str) else value


def frozen(group: str) -> dict[str, Any]:
    """The frozen answers of a group by name of the case; none where nothing was frozen."""
    file = _file(group)
    if not file.exists():
        return {}
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return dict(json.loads(line) for line in lines)


def freeze(group: str, answers: dict[str, Any]) -> Path:
    """Write the answers of a group, one case a line; returns the file."""
    file = _file(group)
    file.parent.mkdir(exist_ok=True)
    compact = {"separators": (",", ":"), "ensure_ascii": False}
    lines = [json.dumps([name, answers[name]], **compact) for name in sorted(answers)]
    file.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode(), preset=9))
    return file


def _file(group: str) -> Path:
    return FROZEN / f"{group}.jsonl.xz"
