"""What loading and analysing traces costs, beside HolisticTraceAnalysis and beside the floor; all in one run.

    python benchmarks/loader.py [--hta-python PATH] [--simdjson PREFIX] [--repetitions 5] [--ranks 8 64 512]

1. ``ddpdoctor analyze`` (load and the whole analysis, no cache) against HolisticTraceAnalysis loading the same
   folder and doing only its temporal breakdown and its overlap; needs an environment with HTA and pandas < 3.
2. Loading one file into columns against the floor: decompress it and scan it once with simdjson in C++ into the
   same columns (needs g++, zlib and simdjson's header and library below PREFIX), and msgspec's typed decode of the
   whole file at once.
3. Growth with the number of generated ranks.

Every figure is of a whole process, interpreter and imports included, with compiled Python and checked rules in
their caches (but no trace); the commands take turns. CPU seconds (user
and system, child processes too) stand first: on a machine that does other work, wall time says little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.loading.inputs import SHARED, blown_up, generated, repeated, size_mb  # noqa: E402
from benchmarks.loading.processes import Cost, in_turns, median_and_range  # noqa: E402

PARTS = ROOT / "benchmarks" / "loading"
BLOWN_UP_FROM = SHARED / "hta" / "nccl_parser_config" / "nccl_data.json.gz"
REPEATED_FROM = SHARED / "torchrec" / "sst_sleep_pl_dense_after_backward_2"
REPEATED = ((2, 300), (8, 75))
"""Ranks, and how often the events of each are repeated: 440 MB of JSON either way, times as before 2024."""
PUBLIC = (
    "torchrec/sst_long_a2a_optimizer_4",
    "torchrec/sst_sleep_pl_dense_after_backward_2",
    "torchrec/resnet18",
    "param/dlrm_8rank",
    "hta/nccl_parser_config",
    "hta/df_index_resolver",
)
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""Of all commands; :func:`main` adds where compiled Python and checked rules are kept, for both sides as after an
installation and a first call: the round to warm up fills it."""
LOAD = "import sys; from ddpdoctor.trace import load_trace; print(load_trace(sys.argv[1]).size)"
OURS = "ddpdoctor"
ANALYZE = (sys.executable, "-m", "ddpdoctor", "analyze")


def main() -> None:
    """Measure what can be measured here, and say what is left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hta-python", help="interpreter of an environment with HolisticTraceAnalysis")
    parser.add_argument("--simdjson", type=Path, help="prefix of simdjson, such as /usr")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=205, help="size of the blown-up trace's JSON")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--steps", type=int, default=4, help="recorded steps of a generated rank")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-bench-") as place:
        folder = Path(place)
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        ENVIRONMENT["XDG_CACHE_HOME"] = str(folder / "cache")
        if SHARED.is_dir():
            (folder / "blown-up").mkdir()
            large = folder / "blown-up" / "rank0.json.gz"
            apart(blown_up, BLOWN_UP_FROM, large, options.megabytes * 10**6)
            against_hta(large.parent, options.hta_python, options.repetitions)
            repeated_traces(folder, options.hta_python, options.repetitions)
            against_the_floor(large, options.simdjson, folder, options.repetitions)
        else:
            print(f"skipped: comparison with HTA and with the floor ({SHARED} is not here)")
        growth(folder, options.ranks, options.steps, options.repetitions)


def against_hta(large: Path, hta_python: str | None, repetitions: int) -> None:
    """Load and full analysis against HTA's load and two analyses."""
    if hta_python is None or not has_hta(hta_python):
        print(
            "skipped: comparison with HolisticTraceAnalysis (--hta-python names no interpreter that has it)"
        )
        return
    starts = {OURS: [*ANALYZE, "--help"], "HTA": [hta_python, "-c", "import hta.trace_analysis"]}
    print("start alone (interpreter and imports, no trace)")
    table(in_turns(starts, repetitions, ENVIRONMENT), OURS)
    print("load and full analysis, against HolisticTraceAnalysis's load and two analyses")
    for place in (*(SHARED / name for name in PUBLIC), large):
        commands = {OURS: analysis(place), "HTA": [hta_python, str(PARTS / "hta_side.py"), str(place)]}
        heading(place)
        try:
            table(in_turns(commands, repetitions, ENVIRONMENT), OURS)
        except RuntimeError as error:
            print(f"  skipped: {str(error).splitlines()[-1]}")


def repeated_traces(folder: Path, hta_python: str | None, repetitions: int) -> None:
    """Many steps with many collectives: the whole analysis against HTA and against decompressing and decoding alone."""
    floor_python = hta_python if hta_python is not None and has_hta(hta_python) else None
    print(
        "load and full analysis of many repeated steps, against HTA and against the floor (msgspec in two processes)"
    )
    for ranks, times in REPEATED:
        place = folder / f"{ranks}-ranks-{times}-times"
        apart(repeated, REPEATED_FROM, place, ranks, times)
        files = sorted(map(str, place.iterdir()))
        commands = {
            OURS: analysis(place),
            "floor": [floor_python or sys.executable, str(PARTS / "msgspec_side.py"), *files],
        }
        if floor_python is not None:
            commands["HTA"] = [floor_python, str(PARTS / "hta_side.py"), str(place)]
        heading(place)
        table(in_turns(commands, repetitions, ENVIRONMENT), OURS)
        shutil.rmtree(place)


def has_hta(python: str) -> bool:
    """Whether ``python`` is an interpreter that can import HolisticTraceAnalysis."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", "import hta.trace_analysis"], capture_output=True).returncode == 0


def against_the_floor(large: Path, simdjson: Path | None, folder: Path, repetitions: int) -> None:
    """Load alone against what any loader must do at least."""
    commands = {
        "load_trace": [sys.executable, "-c", LOAD, str(large)],
        "msgspec, no columns": [sys.executable, str(PARTS / "msgspec_side.py"), str(large)],
    }
    floor = compiled(simdjson, folder) if simdjson is not None else None
    if floor is None:
        print("skipped: the floor in C++ (needs --simdjson PREFIX, g++ and zlib)")
    else:
        commands["C++ simdjson"] = [str(floor), str(large)]
    print("load alone, against the floor")
    heading(large)
    table(in_turns(commands, repetitions, ENVIRONMENT), "load_trace")


def growth(folder: Path, ranks: Sequence[int], steps: int, repetitions: int) -> None:
    """Time and memory of load and full analysis by number of ranks; between sizes, what each more rank costs."""
    print("load and full analysis, by generated ranks")
    before: tuple[int, float, float] | None = None
    for count in ranks:
        place = folder / f"{count}-ranks"
        apart(generated, count, place, steps)
        costs = in_turns({OURS: analysis(place)}, repetitions, ENVIRONMENT)[OURS]
        heading(place)
        table({OURS: costs}, OURS)
        cpu_s, peak_mb = middle(costs)
        if before is not None:
            more = count - before[0]
            print(
                f"  each of {more} more ranks: {(cpu_s - before[1]) / more * 1e3:.1f} ms CPU, "
                f"{(peak_mb - before[2]) / more:.2f} MB"
            )
        before = (count, cpu_s, peak_mb)
        shutil.rmtree(place)


def apart(make: Callable[..., object], *arguments: object) -> None:
    """Calls ``make`` in a process of its own: what this one once held would count as its children's peak."""
    process = multiprocessing.get_context("spawn").Process(target=make, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{make.__name__} failed")


def analysis(place: Path) -> list[str]:
    """The command for load and full analysis without the cache."""
    return [*ANALYZE, str(place), "--no-cache", "-q"]


def compiled(simdjson: Path, folder: Path) -> Path | None:
    """The floor as a program; None where it cannot be built."""
    libraries = sorted({str(file.parent) for file in simdjson.rglob("libsimdjson.so")})
    target = folder / "floor"
    command = [
        "g++",
        "-O3",
        "-march=native",
        "-std=c++17",
        f"-I{simdjson / 'include'}",
        str(PARTS / "floor.cpp"),
    ]
    command += [f"{flag}{path}" for path in libraries for flag in ("-L", "-Wl,-rpath,")]
    if shutil.which("g++") is None:
        return None
    built = subprocess.run([*command, "-lsimdjson", "-lz", "-o", str(target)], capture_output=True)
    return target if built.returncode == 0 else None


def heading(place: Path) -> None:
    """Name and size of an input."""
    packed, plain = size_mb(place)
    print(f" {place.name}: {packed:.1f} MB on disk, {plain:.1f} MB of JSON")


def table(costs: Mapping[str, Sequence[Cost]], ours: str) -> None:
    """One line a command: medians, ranges, and ratios to ``ours`` of the same round."""
    for name, found in costs.items():
        cpu = median_and_range([cost.cpu_s for cost in found])
        wall = median_and_range([cost.wall_s for cost in found])
        peak = median_and_range([cost.peak_mb for cost in found], ".0f")
        print(f"  {name:20} CPU s {cpu:24} wall s {wall:24} peak MB {peak}")
        if name != ours:
            pairs = list(zip(found, costs[ours], strict=True))
            ratios = [median_and_range([a.cpu_s / b.cpu_s for a, b in pairs])]
            ratios += [median_and_range([a.wall_s / b.wall_s for a, b in pairs])]
            ratios += [median_and_range([a.peak_mb / b.peak_mb for a, b in pairs])]
            print(f"  {name} / {ours}: CPU {ratios[0]}, wall {ratios[1]}, peak {ratios[2]}", flush=True)


def middle(costs: Sequence[Cost]) -> tuple[float, float]:
    """Medians of CPU seconds and of peak memory in MB."""
    return statistics.median(c.cpu_s for c in costs), statistics.median(c.peak_mb for c in costs)


if __name__ == "__main__":
    main()
