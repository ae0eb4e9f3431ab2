"""The jobs that are measured again and again: read once, kept in memory."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ddpdoctor.analysis.driver import PreparedJob, conclude, prepare, windows_of
from ddpdoctor.analysis.inputs import Options
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.errors import DdpDoctorError
from tests.net import cases

from . import near

GROUPS = {
    "near": cases.Group(near.names, near.make),
    "generated": cases.GROUPS["generated"],
    "traces": cases.GROUPS["traces"],
}
"""Jobs drawn near thresholds, and of the net those drawn from fixed seeds and the public sets, where they are here."""
OPTIONS = Options(cache=False, jobs=1, loaded_rules=load_rules(()))
PRICE_DIFFERS = 0.2
"""Of the larger of two prices of one finding."""


@dataclass(frozen=True)
class Answer:
    """The first finding."""

    rule: str | None
    ranks: tuple[int, ...] | None = None
    ms: float | None = None

    def __str__(self) -> str:
        if self.rule is None:
            return "nothing found"
        who = "" if self.ranks is None else f" by {', '.join(map(str, self.ranks))}"
        return f"{self.rule}{who}" + ("" if self.ms is None else f", {self.ms:.3g} ms")

    def differs(self, other: Answer) -> str | None:
        """What is different: "finding", "ranks" or "price"; None where nothing is."""
        if self.rule != other.rule:
            return "finding"
        if self.ranks != other.ranks:
            return "ranks"
        here, there = self.ms or 0.0, other.ms or 0.0
        return "price" if abs(here - there) > PRICE_DIFFERS * max(here, there) else None


def answer_of(prepared: PreparedJob) -> Answer:
    """The first finding by the constants as they are now."""
    return first_finding(conclude(prepared, OPTIONS))


def with_windows(prepared: PreparedJob) -> PreparedJob:
    """The same recordings, with their windows by the constants as they are now."""
    return msgspec.structs.replace(prepared, windows=windows_of(prepared.inputs.traces, prepared.logs))


def first_finding(diagnosis: Diagnosis) -> Answer:
    """The first finding of a diagnosis."""
    if not diagnosis.findings:
        return Answer(None)
    first = diagnosis.findings[0]
    ranks = None if first.ranks is None else tuple(first.ranks)
    return Answer(first.rule, ranks, first.costs_ms_per_step)


def drawn(part: float, seed: int) -> list[tuple[str, str]]:
    """(origin, name) of that part of the cases of each origin that is here."""
    rng = random.Random(f"sweep {seed}")
    chosen: list[tuple[str, str]] = []
    for origin, group in GROUPS.items():
        if group.place is None or group.place.is_dir():
            names = group.names()
            chosen += [(origin, name) for name in sorted(rng.sample(names, max(1, round(part * len(names)))))]
    return chosen


def read(origin: str, name: str) -> PreparedJob | None:
    """A case in memory; None where it is refused."""
    with tempfile.TemporaryDirectory(prefix="sweep") as folder:
        place = GROUPS[origin].lay_out(name, Path(folder))
        try:
            return prepare([str(place)], OPTIONS)
        except DdpDoctorError:
            return None
