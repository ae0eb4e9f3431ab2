"""The jobs that are measured again and again: read once, kept in memory. Some are drawn so that decisions are close: little is planted,
windows are short, and computation goes on some time after what it waited for."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ddpdoctor.analysis.driver import PreparedJob, conclude, prepare
from ddpdoctor.analysis.inputs import Options
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.measure.align import windows_of
from tests.generator import Config, Plant, When, cpu_job, generate
from tests.generator.rundirectory import generate_run
from tests.net import cases

COUNT = 60
KINDS = (
    "slow_data",
    "slow_forward",
    "slow_backward_kernels",
    "throttled",
    "host_gap_backward",
    "host_work_end_of_step",
)
STEP_MS = 6.0
"""About, of all of them; what is planted is 1 to 15 % of it."""


def _near_names() -> list[str]:
    """Names of all cases; each holds all that the case follows from."""
    return [f"near-{number:03}-{KINDS[number % len(KINDS)]}" for number in range(COUNT)]


def _near_job(name: str, folder: Path) -> Path:
    """Write the case; returns what is to be analysed."""
    number, kind = int(name.split("-")[1]), name.split("-")[2]
    rng = random.Random(f"sweep {name}")
    share, world = rng.uniform(0.01, 0.15), rng.choice((2, 2, 3, 4, 8))
    plant = Plant(
        kind,
        ranks=(rng.randrange(world),),
        ms=share * STEP_MS,
        factor=1.0 + share,
        when=When(every=rng.choice((1, 1, 1, 2, 3)), probability=rng.choice((1.0, 1.0, 0.7))),
    )
    form = (number // len(KINDS)) % 3
    shape = {
        "world_size": world,
        "seed": number,
        "jitter": rng.uniform(0.01, 0.08),
        "forward_us": 1500.0,
        "backward_us": 3000.0,
        "forward_kernels": 8,
        "backward_kernels": 16,
        "bucket_bytes": tuple(rng.randint(500_000, 3_000_000) for _ in range(rng.randint(1, 4))),
        "resume_us": rng.uniform(0.0, 300.0),
        "plants": (plant,),
    }
    if form == 0:
        width = rng.choice((1, world))
        generate(Config(**shape, tensor_parallel=width, steps=rng.randint(3, 10)), folder / "near")
    elif form == 1:
        generate(cpu_job(**shape, steps=rng.randint(3, 10)), folder / "near")
    else:
        generate_run(cpu_job(**shape, steps=2, warmup_steps=rng.choice((12, 24, 48))), folder / "near")
    return folder / "near"


GROUPS = {
    "near": cases.Group(_near_names, _near_job),
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
        place = GROUPS[origin].make(name, Path(folder))
        try:
            return prepare([str(place)], OPTIONS)
        except DdpDoctorError:
            return None
