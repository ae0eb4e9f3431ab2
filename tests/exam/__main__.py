"""``python -m tests.exam``: unseen jobs and traces with faults, and how many were named rightly."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from . import planted
from .page import HALVES, page, unmarked_sentence
from .real import link, restarts, when
from .real.kinds import KINDS, TRAPS, Asked
from .real.record import RUN, record
from .score import Mark, asked_in, mark, totals
from .score_runs import mark_restarts, mark_when

REAL, GENERATED = 10, 100
"""Default numbers of cases; they take some minutes on two cores."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the exam. Returns 0 regardless of the marks, because they are a measurement."""
    parser = argparse.ArgumentParser(prog="python -m tests.exam", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="the first case's; each further case has the next [1]"
    )
    parser.add_argument("--real", type=int, metavar="K", help="so many jobs on CPU ranks")
    parser.add_argument(
        "--when", type=int, metavar="K", help="so many jobs on CPU ranks with work at drawn times of the run"
    )
    parser.add_argument("--restarts", type=int, metavar="K", help="so many jobs that torchrun restarts")
    parser.add_argument("--generated", type=int, metavar="K", help="so many traces of simulated GPU jobs")
    parser.add_argument("--short", type=int, metavar="K", help="so many of these with two to four steps")
    parser.add_argument(
        "--each",
        nargs="?",
        const="",
        metavar="NAME",
        help="one real job of each kind of fault, each trap, and a slow link; only those with NAME in their name",
    )
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="run the jobs and keep them; do not diagnose"
    )
    parser.add_argument("--judge", type=Path, metavar="DIR", help="diagnose the jobs that --record kept")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of cases with a miss")
    parser.add_argument("--json", type=Path, metavar="F", help="write marks, misses and totals")
    parser.add_argument(
        "--marks", type=Path, metavar="F", nargs="+", default=[], help="take also the marks that --json wrote"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write a page of all marks")
    parser.add_argument("--remark", default="", metavar="TEXT", help="a sentence at the page's head")
    chosen = parser.parse_args(arguments)
    real, generated = chosen.real or 0, chosen.generated or 0
    given = (chosen.real, chosen.when, chosen.restarts, chosen.generated, chosen.short, chosen.each)
    if given.count(None) == len(given) and not chosen.judge and not chosen.marks:
        real, generated = REAL, GENERATED
    jobs: Jobs = [(str(seed), partial(record, seed)) for seed in range(chosen.seed, chosen.seed + real)]
    for kind, count, job in (
        ("when", chosen.when, when.record),
        ("restarts", chosen.restarts, restarts.record),
    ):
        seeds = range(chosen.seed, chosen.seed + (count or 0))
        jobs += [(f"{kind}-{seed}", partial(job, seed)) for seed in seeds]
    if chosen.each is not None:
        jobs += [job for job in each_kind(chosen.seed) if chosen.each in job[0]]
    if chosen.record:
        _record_jobs(jobs, chosen.record)
        return 0
    marks = [Mark(**each) for file in chosen.marks for each in json.loads(file.read_text())["cases"]]
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-exam-") as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        work = Path(scratch)
        kept_cases = _kept_cases(chosen.judge) if chosen.judge else iter(())
        made = _real_cases(jobs, work)
        drawn = (simulated(seed, work) for seed in range(chosen.seed, chosen.seed + generated))
        short = (
            simulated(seed, work, short=True)
            for seed in range(chosen.seed, chosen.seed + (chosen.short or 0))
        )
        for cases in (kept_cases, made, drawn, short):
            for case, folder, evidence in cases:
                marks.append(examined(case, evidence))
                if chosen.keep and marks[-1].misses and not chosen.judge:
                    shutil.copytree(folder, chosen.keep / folder.name, dirs_exist_ok=True)
                if not chosen.judge:
                    shutil.rmtree(folder)
    _print_marks(marks)
    if chosen.json:
        result = {"totals": totals(marks), "cases": [dataclasses.asdict(each) for each in marks]}
        chosen.json.write_text(json.dumps(result, indent=1))
    if chosen.write:
        chosen.write.write_text(page(marks, chosen.remark), encoding="utf-8")
    return 0


EVIDENCE = {
    **dict.fromkeys(("real", "named", "when", "restarts"), RUN),
    **dict.fromkeys(("generated", "short"), "traces"),
}
MARKS = {"when": mark_when, "restarts": mark_restarts}
Found = Iterator[tuple[planted.Case, Path, Path]]
Jobs = list[tuple[str, Callable[[Path], planted.Case]]]
"""(Name of a job, function that records it into a folder)."""


def each_kind(seed: int) -> Jobs:
    """One job per kind of fault, with ranks and the rest of its shape drawn from ``seed``, one per trap, and the links."""
    chance = random.Random(f"exam each {seed}")
    jobs: Jobs = []
    for kind in KINDS:
        world, spawned = chance.choice((2, 4)), chance.random() < 0.25
        # Paced, so that having more ranks than cores, or a busy machine, does not add a fault.
        shape: dict[str, object] = {"model": "accelerator", **KINDS[kind].shape}
        if kind == "contended":
            shape["model"] = "mlp"
        if not KINDS[kind].sites:
            world = 2
        if spawned:  # the workers would also be spawned, but they are forked in the twin
            shape.setdefault("workers", 0)
            spawned = not shape["workers"]
        jobs.append((kind, partial(record, seed, asked=Asked(kind, shape, world=world, spawned=spawned))))
    jobs += [(name, partial(record, seed, asked=asked, trap=name)) for name, asked in TRAPS.items()]
    return jobs + [(name, partial(link.record, name, seed)) for name in link.NAMES]


def _record_jobs(jobs: Jobs, folder: Path) -> None:
    for name, job in jobs:
        if not (folder / name / planted.FILE_NAME).exists():
            _run_job(name, job, folder / name)


def _run_job(name: str, job: Callable[[Path], planted.Case], folder: Path) -> planted.Case | None:
    """The case; None if its job could not be run, which does not count as an answer of the diagnosis."""
    try:
        case = job(folder)
    except (RuntimeError, OSError, TimeoutError) as error:
        print(f"{name}: could not be run: {error}", file=sys.stderr, flush=True)
        return None
    print(
        f"{name}: {case.step_ms:.1f} ms, {[fault.kind for fault in case.faults]}", file=sys.stderr, flush=True
    )
    return case


def _kept_cases(folder: Path) -> Found:
    """The cases in ``folder``, of any half, written by --record or --keep."""
    cases = [(planted.read(truth.parent), truth.parent) for truth in folder.glob(f"*/{planted.FILE_NAME}")]
    for case, at in sorted(cases, key=lambda pair: (pair[0].half, pair[0].seed)):
        yield case, at, at / EVIDENCE[case.half]


def _real_cases(jobs: Jobs, work: Path) -> Found:
    """Run the jobs; yields those that succeed."""
    for name, job in jobs:
        folder = work / f"real-{name}"
        case = _run_job(name, job, folder)
        if case is not None:
            yield case, folder, folder / RUN


def simulated(seed: int, work: Path, *, short: bool = False) -> tuple[planted.Case, Path, Path]:
    """(Case of ``seed``, its folder in ``work``, its traces in that folder)."""
    from .gpu.draw import case_of, setup_of
    from .gpu.trace import number_collectives, write

    setup = setup_of(seed, short=short)
    case, ranks = case_of(setup)
    folder = work / f"{case.half}-{seed}"
    number_collectives(ranks)
    traces = folder / EVIDENCE[case.half]
    write(setup, ranks, traces)
    case.write(folder)
    return case, folder, traces


def examined(case: planted.Case, evidence: Path) -> Mark:
    """The marks of one case. A failed analysis counts as one without findings."""
    import msgspec

    import ddpdoctor
    from ddpdoctor.errors import DdpDoctorError

    try:
        diagnosis: dict[str, Any] = msgspec.to_builtins(ddpdoctor.analyze(evidence), enc_hook=_python_value)
    except DdpDoctorError as error:
        diagnosis = {"job": {"ranks_seen": []}, "steps": {"mean_ms": None}, "findings": []}
        diagnosis["job"]["duration_s"] = 0.0
        diagnosis["facts"] = {"run": {}}
        print(f"{case.half} {case.seed}: no diagnosis: {error}", file=sys.stderr, flush=True)
    marked = MARKS.get(case.half, mark)(case, diagnosis)
    for miss in marked.misses:
        print(f"{case.half} {case.seed}: {miss}", file=sys.stderr, flush=True)
    return marked


def _python_value(value: Any) -> Any:
    """A NumPy value as a Python value."""
    return value.tolist()


def _print_marks(marks: list[Mark]) -> None:
    for half in HALVES:
        marks_of_half = [each for each in marks if each.half == half]
        if not marks_of_half:
            continue
        print(f"\n{half}: {len(marks_of_half)} cases")
        rows = totals(marks_of_half)
        columns = asked_in(rows)
        print(f"{'':20}" + "".join(f"{what:>12}" for what in columns))
        for kind, row in rows.items():
            print(f"{kind:20}" + "".join(f"{f'{row[what][0]}/{row[what][1]}':>12}" for what in columns))
        for each in marks_of_half:
            if each.misses or each.doubts:
                print(f"seed {each.seed} ({' + '.join(each.kinds) or 'healthy'})")
                print("".join(f"    {line}\n" for line in (*each.misses, *each.doubts)), end="")
                print("".join(f"      said {line}\n" for line in each.said), end="")
        without_ms = [pair for each in marks_of_half for pair in each.without_ms]
        if any(doubt.startswith("noisy: ") for each in marks_of_half for doubt in each.doubts):
            print(unmarked_sentence(marks_of_half))
        if without_ms:
            errors = [abs(predicted / measured - 1) for measured, predicted in without_ms]
            print(f"step without the fault: predicted within {median(errors):.1%} (median of {len(errors)})")


if __name__ == "__main__":
    sys.exit(main())
