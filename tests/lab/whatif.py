"""``python -m tests.lab.whatif``: what the diagnosis says a step would take without the fault, against the same job without it."""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

from .cases import Case, draw
from .trial import Bench

FAULTS = (
    "data-all/strong",
    "data-one/strong",
    "forward-one/strong",
    "backward-one/strong",
    "log-one/strong",
    "every-k-one/strong",
    "barrier/strong",
    "many-metrics/strong",
)
_ROW = "{:<24} {:<20} {:>10} {:>10} {:>10} {:>8}"


def chosen(seed: int) -> list[Case]:
    """The cases, on two ranks: fewer threads than cores disturb the times least."""
    cases = {case.name: case for case in draw(seed)}
    small = [replace(cases[name], job=replace(cases[name].job, ranks=2)) for name in FAULTS]
    return [replace(case, rank=case.rank % 2) for case in small]


def compare(bench: Bench, case: Case) -> dict[str, float] | None:
    """Step times in ms: with the fault, predicted without it, and measured without it just before and just after."""
    random = Random(case.seed)
    before = bench.run(case)
    judged = before.judgement
    if judged is None or judged.predicted_ms is None or before.step_ms is None or before.truth_ms is None:
        return None
    first_ms = before.step_ms - before.truth_ms
    assert case.fault
    label = f"{case.fault.name}-{case.size}" if case.fault.base else ""
    again = Bench(bench.folder / f"{case.fault.name}-again")
    plants = [case.fault.base(bench.guess(case, random))] if case.fault.base else []
    second_ms = again.healthy(case.job, plants, label).step_ms
    return {
        "with_ms": before.step_ms,
        "predicted_ms": before.step_ms - judged.predicted_ms,
        "measured_ms": (first_ms + second_ms) / 2,
        "repeat_error": abs(first_ms - second_ms) / second_ms,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.whatif", description=__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, metavar="F", help="write the numbers there")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="ddpdoctor-whatif-"))
    print(f"seed {seed}, runs kept in {folder}; step times in ms", flush=True)
    print(_ROW.format("fault", "job", "with it", "predicted", "measured", "error"))
    errors: list[float] = []
    repeats: list[float] = []
    results = {}
    for case in chosen(seed):
        job = f"{case.job.script} {case.job.ranks}x{case.job.step_ms:g}ms"
        result = results[case.name] = compare(Bench(folder / case.name.replace("/", "-")), case)
        if result is None:
            print(f"{case.name:<24} {job:<20} not found by the diagnosis", flush=True)
            continue
        errors.append(abs(result["predicted_ms"] - result["measured_ms"]) / result["measured_ms"])
        repeats.append(result["repeat_error"])
        times = [f"{result[key]:.1f}" for key in ("with_ms", "predicted_ms", "measured_ms")]
        print(_ROW.format(case.name, job, *times, f"{errors[-1]:.1%}"), flush=True)
    if errors:
        print(f"median error {statistics.median(errors):.1%} of {len(errors)} of {len(results)} faults")
        print(
            f"the job without a fault differs from itself, run twice, by {statistics.median(repeats):.1%} (median)"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
