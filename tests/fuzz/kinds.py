"""What is mutated: small files of each kind that ddpdoctor reads, and the commands that read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READ = ("--no-cache", "--jobs", "1")
OUTPUTS = (
    "--html",
    "out/r.html",
    "--json",
    "out/d.json",
    "--markdown",
    "out/r.md",
    "--sarif",
    "out/r.sarif",
    "--junit",
    "out/r.xml",
)


@dataclass(frozen=True)
class Kind:
    """Files of one kind: ``make`` writes them into a folder, ``mutated`` are the patterns of those to change, and each of
    ``commands`` reads them."""

    name: str
    make: Callable[[Path], None]
    mutated: Sequence[str]
    commands: Sequence[Sequence[str]]
    kept: bool = False
    """What was changed is not ddpdoctor's own any more: no command may replace or remove it."""
    named: bool = False
    """The command line names the file itself: a FIFO is then waited for, as a process substitution needs it."""


def _recorded(folder: Path) -> None:
    """A run of two CPU ranks, 14 steps, without traces."""
    fixture = ROOT / "fixtures" / "slow-data-one-rank"
    run = folder / "run"
    shutil.copytree(fixture, run, ignore=shutil.ignore_patterns("trace.json.gz", "expected.json"))
    for log in run.glob("ranks/*/steps.jsonl"):
        lines = log.read_text().splitlines(keepends=True)
        first = next(i for i, line in enumerate(lines) if '"step":0' in line)
        log.write_text("".join(lines[: first + 14] + lines[-3:]))
        log.with_name("memory.jsonl").write_text(_device_memory())
        log.with_name("workers.jsonl").write_text(_workers())
    for log in run.glob("hosts/*/telemetry.jsonl"):
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:8]) + _gpu_samples())


def _device_memory() -> str:
    """Looks at the counters of a device."""
    look = {"phase": "backward", "allocated_bytes": 9 << 30, "reserved_bytes": 11 << 30, "retries": 0}
    lines = [{"schema": "ddpdoctor.memory/1", "device": "cuda:0", "total_bytes": 80 << 30}]
    lines += [{"t_ns": 1795228902532466431 + i * 10**9, "step": 2 * i, **look} for i in range(6)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _workers() -> str:
    """What two workers of a data loader did."""
    lines: list[dict[str, object]] = [{"loader": 0, "pids": [7, 8]}]
    for pid, worker in ((7, 0), (8, 1)):
        lines.append({"where": 0, "file": "/data.py", "line": 9, "function": "get", "pid": pid})
        lines.append({"where": 1, "file": "/data.py", "line": 5, "function": "read", "by": 0, "pid": pid})
        begin = 1795228902532466431
        did = {"n": 20, "d": 800 * 10**6, "q": 32000.0, "cpu": 5 * 10**8, "runq": 10**8}
        samples = {"s": [[i * 10**7, 1, 0, i % 2] for i in range(20)], "h": [0, 2 * 10**6] * 10}
        lines.append({"pid": pid, "worker": worker, "of": 2, "t": [begin, begin + 10**9], **did, **samples})
    return "".join(json.dumps(line) + "\n" for line in lines)


def _gpu_samples() -> str:
    gpu = {
        "index": 0,
        "gpu_utilization_percent": 90,
        "memory_used_bytes": 10**9,
        "power_watts": 300.5,
        "sm_clock_mhz": 1400,
    }
    gpu |= {
        "temperature_celsius": 60,
        "throttle_reasons": ["sw_power_cap"],
        "xid_errors": [79],
        "processes": [{"pid": 7}],
    }
    used = {"0": {"pid": 7, "cpu_percent": 90.0, "rss_bytes": 10**9}, "1": {"pid": 8, "cpu_percent": 80.0}}
    samples = [
        {"t_ns": 1795228902532466431 + i * 10**9, "host": {"cpu_percent": 50.0}, "ranks": used, "gpus": [gpu]}
        for i in range(6)
    ]
    return "".join(json.dumps(sample) + "\n" for sample in samples)


def _traced(folder: Path) -> None:
    """A run of two GPU ranks with a profiler window."""
    from tests.generator.model import Config
    from tests.generator.rundirectory import generate_run

    small = {
        "forward_kernels": 4,
        "backward_kernels": 6,
        "optimizer_kernels": 1,
        "bucket_bytes": (10_000_000,) * 2,
    }
    generate_run(Config(world_size=2, steps=3, warmup_steps=4, **small), folder / "run")


def _traces(folder: Path) -> None:
    _traced(folder)
    for rank in (0, 1):
        (folder / "traces").mkdir(exist_ok=True)
        shutil.move(folder / f"run/ranks/0000{rank}/trace.json.gz", folder / f"traces/rank{rank}.json.gz")
    shutil.rmtree(folder / "run")


def _nsight(folder: Path) -> None:
    """Two exports of Nsight Systems, one of them of two processes."""
    from ddpdoctor.trace import find_traces, load_traces
    from tests.trace.nsight_export import OLD, export

    _traces(folder)
    traces = load_traces(find_traces([str(folder / "traces")]).files, jobs=1).traces
    export(folder / "report.sqlite", traces, command="torchrun --nproc-per-node 2 train.py")
    export(folder / "rank0.sqlite", traces[:1], OLD)
    shutil.rmtree(folder / "traces")


def _digest(folder: Path) -> None:
    from click.testing import CliRunner

    from ddpdoctor.cli.digest import command

    _traced(folder)
    CliRunner().invoke(
        command, [str(folder / "run"), "--out", str(folder / "digest")], catch_exceptions=False
    )
    shutil.rmtree(folder / "run")


def _reports(folder: Path) -> None:
    from ddpdoctor.analysis import Options, analyze
    from ddpdoctor.report.html import write_html
    from ddpdoctor.report.json_output import write_json

    _traced(folder)
    diagnosis = analyze(str(folder / "run"), Options(cache=False, jobs=1))
    shutil.rmtree(folder / "run")
    for name in ("diagnosis", "other"):
        write_json(diagnosis, folder / f"{name}.json")
    write_html(diagnosis, folder / "report.html", static=True)


def _operations(folder: Path) -> None:
    import polars as pl

    kinds = ("forward-compute", "backward-compute", "optimizer", "grads-reduce-scatter")
    rows = [
        {
            "dp_rank": d,
            "stage": s,
            "rank": 2 * d + s,
            "step": step,
            "optype": kind,
            "start_ts": step + 0.2 * k + 0.01 * s,
        }
        | {"duration": 0.1, "seq_id": 0, "mc": 0, "mb_id": 0, "gmc": s}
        for step in range(5)
        for d in (0, 1)
        for s in (0, 1)
        for k, kind in enumerate(kinds)
    ]
    pl.DataFrame(rows).write_parquet(folder / "trace-x.parquet")
    (folder / "meta-x.yaml").write_text("world_size: 4\nmodel: x\n")


def _configured(folder: Path) -> None:
    _recorded(folder)
    (folder / "ddpdoctor.toml").write_text(
        'suppress = ["dataloader/starved"]\nrules = ["rules"]\n[thresholds."all"]\nwarning_share = 0.05\n'
    )
    _rules(folder)


def _bundles(folder: Path) -> None:
    """A bundle as a folder, with files of the user's below it, and as a file."""
    from click.testing import CliRunner

    from ddpdoctor.cli.bundle import command

    for name in ("b", "b.pyz"):
        CliRunner().invoke(command, ["--out", str(folder / name)], catch_exceptions=False)
    for name in ("b/train.py", "b/ddpdoctor/model.py"):
        (folder / name).write_text("import torch\n")


def _rules(folder: Path) -> None:
    (folder / "rules/sync").mkdir(parents=True, exist_ok=True)
    source = (ROOT / "rules/sync/explicit-barrier.yaml").read_text()
    (folder / "rules/sync/ours.yaml").write_text(source.replace("sync/explicit-barrier", "sync/ours"))


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "run",
            _recorded,
            ("run/manifest.json", "run/ranks/*/*", "run/hosts/*/*"),
            (
                ("analyze", "run", *READ, *OUTPUTS),
                ("analyze", "run", *READ, "--verbose"),
                ("watch", "run", "--once"),
                ("export", "run", "--timeline", "out/t.json", "--parquet", "out/tables"),
                ("digest", "run", "--out", "out/digest", "--jobs", "1"),
            ),
        ),
        Kind(
            "telemetry",
            _recorded,
            ("run/hosts/*/telemetry.jsonl",),
            (("analyze", "run", *READ, *OUTPUTS), ("watch", "run", "--once")),
        ),
        Kind(
            "traced",
            _traced,
            ("run/ranks/*/*",),
            (("analyze", "run", *READ, *OUTPUTS), ("digest", "run", "--out", "out/digest", "--jobs", "1")),
        ),
        Kind(
            "trace",
            _traces,
            ("traces/*",),
            (("analyze", "traces", *READ, *OUTPUTS), ("digest", "traces", "--out", "out/d", "--jobs", "1")),
        ),
        Kind(
            "nsight",
            _nsight,
            ("*.sqlite",),
            (
                ("analyze", "report.sqlite", *READ, *OUTPUTS),
                ("analyze", "rank0.sqlite", *READ, *OUTPUTS),
                ("digest", "report.sqlite", "--out", "out/d", "--jobs", "1"),
            ),
            named=True,
        ),
        Kind("digest", _digest, ("digest/ranks/*/trace.columns",), (("analyze", "digest", *READ, *OUTPUTS),)),
        Kind(
            "report",
            _reports,
            ("diagnosis.json", "report.html"),
            (
                ("analyze", "diagnosis.json", *OUTPUTS),
                ("analyze", "diagnosis.json", "--redact", "--verbose"),
                ("analyze", "report.html", *OUTPUTS),
                ("compare", "diagnosis.json", "other.json", "--html", "out/c.html", "--json", "out/c.json"),
                ("compare", "other.json", "report.html"),
                ("analyze", "diagnosis.json", "--redact", *OUTPUTS),
                ("history", ".", "--html", "out/h.html", "--json", "out/h.json"),
                ("export", "diagnosis.json", "--figures", "out/figures"),
            ),
            named=True,
        ),
        Kind(
            "operations",
            _operations,
            ("trace-x.parquet", "meta-x.yaml"),
            (("analyze", "trace-x.parquet", *OUTPUTS),),
            named=True,
        ),
        Kind(
            "bundle",
            _bundles,
            ("b/*", "b/standins/*", "b/ddpdoctor/*.py", "b/ddpdoctor/bundle/*", "b.pyz"),
            (("bundle", "--out", "b"), ("bundle", "--out", "b.pyz")),
            kept=True,
            named=True,
        ),
        Kind("config", _configured, ("ddpdoctor.toml",), (("rules", "list"), ("analyze", "run", *READ))),
        Kind(
            "rule",
            _rules,
            ("rules/sync/ours.yaml",),
            (("rules", "test", "rules"), ("rules", "show", "sync/ours", "--rules", "rules")),
        ),
    )
}
