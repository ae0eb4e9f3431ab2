"""The best change of an experiment as a diff of the user's file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.cli.outputs import say_written
from ddpdoctor.cli.say import say

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.experiment import TrialsReport, Variant


def write_patch(answer: TrialsReport, diagnosis: Diagnosis | None, job: Sequence[str], path: Path) -> None:
    """Into ``path``; a sentence on stderr says where it is, or why there is none. Raises DdpDoctorError where it cannot be written."""
    from ddpdoctor.experiment import patch_of
    from ddpdoctor.written import PATCH, write_file

    best = answer.best()
    if best is None:
        say("ddpdoctor: no change was shown to be faster, so there is no patch.", err=True)
        return
    for file, line in _places(diagnosis, best, job):
        if not Path(file).is_file():  # a device or a pipe has no end
            continue
        try:
            text = Path(file).read_bytes().decode("utf-8")  # line ends as they are
        except (OSError, UnicodeDecodeError):
            continue
        diff = patch_of(text, _relative(file), line, best.settings)
        if diff is not None:
            write_file(path, diff, PATCH)
            say_written([path], err=True)
            return
    say(
        "ddpdoctor: no patch: the line of the constructor is not known, or its arguments are not written out there.",
        err=True,
    )


def _places(
    diagnosis: Diagnosis | None, best: Variant, job: Sequence[str]
) -> Iterator[tuple[str, int | None]]:
    """Where the thing may have been built that the settings belong to, the likeliest first; the script that the command starts
    last, with no line, unless it is known where."""
    built_at = False
    if diagnosis is not None:
        for kind in ("loader", "ddp"):
            if any(name.startswith(f"{kind}.") for name in best.settings):
                known = diagnosis.facts.get(kind)
                where = known.get("where") if isinstance(known, dict) else None
                file = where.get("file") if isinstance(where, dict) else None
                if isinstance(where, dict) and isinstance(file, str):
                    line, built_at = where.get("line"), Path(file).is_file()
                    yield file, line if isinstance(line, int) else 0
        own = [finding for finding in diagnosis.findings if finding.rule == best.finding]
        others = [finding for finding in diagnosis.findings if finding.rule != best.finding]
        yield from ((place.file, place.line) for finding in (*own, *others) for place in finding.where)
    if not built_at:  # else the script's only call may be another's
        yield from ((word, None) for word in job if word.endswith(".py"))


def _relative(file: str) -> str:
    path = os.path.relpath(file)
    return file.lstrip("/") if path.startswith("..") else path
