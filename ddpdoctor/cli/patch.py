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
    from ddpdoctor.diagnose.trials import TrialsReport, Variant


def write_patch(answer: TrialsReport, diagnosis: Diagnosis | None, job: Sequence[str], path: Path) -> None:
    """Write the patch to ``path``; a line on stderr gives its path, or why there is none. Raises DdpDoctorError if it cannot be written."""
    from ddpdoctor.experiment import patch_of
    from ddpdoctor.written import PATCH, write_file

    best = answer.best()
    if best is None:
        say("ddpdoctor: no patch, because no change is significantly faster.", err=True)
        return
    for file, line in _candidate_lines(diagnosis, best, job):
        if not Path(file).is_file():  # reading a device or a pipe may not end
            continue
        try:
            text = Path(file).read_bytes().decode("utf-8")  # keeps line ends
        except (OSError, UnicodeDecodeError):
            continue
        diff = patch_of(text, _relative(file), line, best.settings)
        if diff is not None:
            write_file(path, diff, PATCH)
            say_written([path], err=True)
            return
    say(
        "ddpdoctor: no patch, because the constructor's line is unknown or its arguments are not literals there.",
        err=True,
    )


def _candidate_lines(
    diagnosis: Diagnosis | None, best: Variant, job: Sequence[str]
) -> Iterator[tuple[str, int | None]]:
    """(File, line) where the object of the settings may be built, most likely first. The job's script, without a line, comes last,
    unless the file is known."""
    is_built_at_known = False
    if diagnosis is not None:
        for kind in ("loader", "ddp"):
            if any(name.startswith(f"{kind}.") for name in best.settings):
                known = diagnosis.facts.get(kind)
                where = known.get("where") if isinstance(known, dict) else None
                file = where.get("file") if isinstance(where, dict) else None
                if isinstance(where, dict) and isinstance(file, str):
                    line, is_built_at_known = where.get("line"), Path(file).is_file()
                    yield file, line if isinstance(line, int) else 0
        own_findings = [finding for finding in diagnosis.findings if finding.rule == best.finding]
        others = [finding for finding in diagnosis.findings if finding.rule != best.finding]
        yield from (
            (place.file, place.line) for finding in (*own_findings, *others) for place in finding.where
        )
    if not is_built_at_known:  # else a call in the script may belong to another object
        yield from ((word, None) for word in job if word.endswith(".py"))


def _relative(file: str) -> str:
    path = os.path.relpath(file)
    return file.lstrip("/") if path.startswith("..") else path
