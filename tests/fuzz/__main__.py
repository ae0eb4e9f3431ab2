"""``python -m tests.fuzz``: mutated files by the thousand, with the seed to repeat each."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from . import clients, growth, spools
from .kinds import KINDS
from .trial import Case, environment, fault_of, start

KEPT_OF_A_FAULT = 3
OTHERS: Mapping[str, Callable[[int], Iterator[str]]] = {
    "growth": lambda seed: growth.failures(),
    "metric-clients": clients.failures,
}
"""What is no file to be mutated: each gives sentences about what failed, for a seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="where the mutations begin")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--case", type=int, help="this one alone, and all that it says")
    parser.add_argument(
        "--only", action="append", choices=sorted((*KINDS, *OTHERS)), default=[], help="a kind of input"
    )
    parser.add_argument(
        "--spools", type=int, help="trials of vanishing spools; default: one for each 50 cases"
    )
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where failing inputs go")
    chosen = parser.parse_args(arguments)
    numbers = range(chosen.cases) if chosen.case is None else range(chosen.case, chosen.case + 1)
    only = tuple(name for name in chosen.only if name in KINDS)
    cases = [Case(chosen.seed, number, only) for number in numbers] if only or not chosen.only else []
    print(f"seed {chosen.seed}, {len(cases)} cases", flush=True)
    faults: Counter[str] = Counter()
    for name in OTHERS if chosen.case is None else ():
        if name in (chosen.only or OTHERS):
            for fault in OTHERS[name](chosen.seed):
                faults[name] += 1
                print(f"FAILED: {name}: {fault}", flush=True)
    for case, fault, folder in failures(cases, chosen.keep):
        faults[fault] += 1
        if faults[fault] <= KEPT_OF_A_FAULT:
            print(f"FAILED: {fault}\n  {folder}\n  {case.again}", flush=True)
    if chosen.case is not None:
        print("failed" if faults else "passed")
    else:
        print(f"seed {chosen.seed}: {len(cases)} cases, {faults.total()} failures of {len(faults)} sorts")
    for fault, count in faults.most_common():
        print(f"{count:6} {fault}")
    trials = 0 if chosen.only or chosen.case is not None else chosen.cases // 50
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        lost = spools.failures(chosen.seed, trials if chosen.spools is None else chosen.spools, Path(folder))
    print("\n".join([*lost, f"spools: {len(lost)} failures"]))
    return 1 if faults or lost else 0


def failures(cases: Sequence[Case], keep: Path | None) -> Iterator[tuple[Case, str, Path | None]]:
    """Each case that failed, twice, with its fault and where its input was kept."""
    if not cases:
        return
    with tempfile.TemporaryDirectory(prefix="fuzz", ignore_cleanup_errors=True) as folder:
        base = Path(folder)
        os.environ.update(environment(base))
        seeds = _seeds(base / "seeds", cases[0].only or tuple(KINDS))
        _warm(seeds)
        for case, fault, place in _all(cases, seeds, base, os.cpu_count() or 1):
            # Alone and again: a machine with other work may have been too slow.
            repeated = base / "again"
            shutil.rmtree(repeated, ignore_errors=True)
            _, status, used = os.wait4(start(case, seeds, repeated), 0)
            again = fault_of(repeated, status, used.ru_maxrss * 1024 - _resident_bytes())
            if again is None:
                print(f"not repeated: {fault} ({case.again})", flush=True)
                continue
            kept = None
            if keep is not None:
                kept = keep / f"{case.seed}-{case.number}"
                shutil.rmtree(kept, ignore_errors=True)
                kept.mkdir(parents=True)
                for name in ("case", "stderr"):
                    shutil.copy(place / name, kept)
                _keep(place / "in", kept / "in")
            yield case, again, kept


def _all(cases: Sequence[Case], seeds: Path, base: Path, workers: int) -> Iterator[tuple[Case, str, Path]]:
    """(case, fault, folder) of each that failed; the folder lives until the next is asked for."""
    before = _resident_bytes()
    waiting, busy, began_s = list(reversed(cases)), {}, time.monotonic()
    while waiting or busy:
        while waiting and len(busy) < workers:
            case = waiting.pop()
            place = base / f"{case.number}"
            busy[start(case, seeds, place)] = case, place
        child, status, used = os.wait4(-1, 0)
        if child not in busy:
            continue
        case, place = busy.pop(child)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        fault = fault_of(place, status, used.ru_maxrss * 1024 - before)
        if fault is not None:
            yield case, fault, place
        shutil.rmtree(place, ignore_errors=True)
        if case.number and case.number % 1000 == 0:
            print(f"{case.number} cases, {time.monotonic() - began_s:.0f} s", flush=True)


def _seeds(folder: Path, names: Sequence[str]) -> Path:
    """The files to mutate, made in a child: what is imported and begun for that is no matter of the cases."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for kind in map(KINDS.__getitem__, names):
                (folder / kind.name).mkdir(parents=True)
                kind.make(folder / kind.name)
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("the files to mutate could not be made")
    return folder


def _warm(seeds: Path) -> None:
    """Import what the commands need, read the rules and compile the templates, so that each forked child has them."""
    import gc
    import importlib

    for name in (
        "cli.analyze",
        "cli.compare",
        "cli.export",
        "cli.digest",
        "cli.history",
        "cli.watch",
        "cli.rules",
        "report.html",
    ):
        importlib.import_module(f"ddpdoctor.{name}")
    for name in ("report.sarif", "report.junit", "report.markdown", "report.redaction", "measure.pipeline"):
        importlib.import_module(f"ddpdoctor.{name}")
    for name in ("jinja2.sandbox", "cel", "polars", "yaml"):
        importlib.import_module(name)
    from ddpdoctor.analysis import Options, analyze
    from ddpdoctor.report.html import page_environment, render_html

    recorded = next(seeds.glob("*/run"), None)
    if recorded is not None:
        render_html(analyze(str(recorded), Options(cache=False, jobs=1)))
    page_environment().get_template("compare.html.j2")
    # What is frozen is not copied when a child collects its garbage.
    gc.collect()
    gc.freeze()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _keep(source: Path, target: Path) -> None:
    """What can be copied of a mutated input: no pipes, and of endless files nothing."""

    def odd(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name) for name in names}
        return [
            name
            for name, path in paths.items()
            if not path.is_symlink()
            and not path.is_dir()
            and (not path.is_file() or path.stat().st_size > 1 << 26)
        ]

    shutil.copytree(source, target, symlinks=True, ignore=odd)


if __name__ == "__main__":
    sys.exit(main())
