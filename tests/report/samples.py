"""Diagnoses as the analysis would give them: unhealthy, healthy, empty, huge, hostile.

Long because it is data: one diagnosis per kind, with every field that a report shows.
"""

from __future__ import annotations

import math
import random

from ddpdoctor.diagnose.diagnosis import (
    BandwidthPoint,
    CheckedRule,
    Coverage,
    Diagnosis,
    Evidence,
    Finding,
    Fix,
    Flame,
    FlameFrame,
    Job,
    RankSummary,
    Series,
    SkippedRule,
    Span,
    Steps,
    TelemetrySeries,
    Timeline,
    Verdict,
    WaterfallBar,
)
from ddpdoctor.measure.places import CodeLine, SourceText, Where
from ddpdoctor.measure.taxonomy import PARTS

NOT_ENDED = {
    "cut off": "was cut off",
    "killed": "was killed",
    "running": "is still running",
    "unknown": "has no recorded end",
}
"""``end`` of a job that does not count as passed, and its description."""
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"


RUN = {
    "wall_s": 40.0,
    "goodput": 0.15,
    "start_s": 9.0,
    "preparation_s": 4.0,
    "steps_s": 6.99,
    "some_steps_s": 1.0,
    "pauses_s": 8.0,
    "profiler_s": 0.01,
    "end_s": 11.0,
    "pause": {
        "steps": [50, 100],
        "total_s": 8.0,
        "where": [{"file": "/home/alice/work/train.py", "line": 61, "function": "refresh_cache"}],
    },
    "periodic": {"steps": [20, 30, 40], "total_s": 1.0, "every": 10},
    "change": {"steps": [60, 127], "total_s": 0.5, "before_ms": 51.0, "after_ms": 62.0},
    "growth": None,
}
"""Facts of a run with two pauses, a period and a change."""


def unhealthy() -> Diagnosis:
    """Two ranks; rank 1 waits for data, and there is a barrier."""
    rng = random.Random(7)
    steps = list(range(10, 128))
    late = [[0.0 for _ in steps], [44.0 + rng.gauss(0, 4) for _ in steps]]
    step_ms = [[51.0 + rng.gauss(0, 2) for _ in steps] for _ in range(2)]
    return Diagnosis(
        tool_version="0.1.0",
        created_ns=1_795_000_000_000_000_000,
        source=["/home/alice/work/runs/20261120-101500"],
        healthy=False,
        verdict=Verdict(
            "dataloader/one-rank-late", "Rank 1 waits 46 ms per step for data; all others wait for it"
        ),
        job=Job(
            world_size=2,
            ranks_seen=[0, 1],
            hosts=["node17.cluster.example.com"],
            backend="gloo",
            device="cpu",
            command=[
                "torchrun",
                "--nproc-per-node=2",
                "/home/alice/work/train.py",
                "--data",
                "/mnt/acme/secret-set",
            ],
            versions={"torch": "2.13.0", "python": "3.11.9", "ddpdoctor": "0.1.0"},
            settings={
                "DDP": {"bucket_cap_mb": 25, "find_unused_parameters": False, "static_graph": None},
                "DataLoader": {"num_workers": 0, "pin_memory": False, "batch_size": 64},
            },
            environment={"OMP_NUM_THREADS": "1", "USER": "alice", "MASTER_ADDR": "10.1.2.3"},
            started_ns=1_794_999_000_000_000_000,
            duration_s=8.2,
            exit_code=0,
        ),
        steps=Steps(
            count=128,
            measured=118,
            median_ms=51.2,
            mean_ms=51.4,
            p95_ms=55.0,
            samples_per_s=2500.0,
            set_aside={"warm-up": 8, "profiler": 2},
        ),
        breakdown={"data_wait": 0.87, "compute": 0.08, "comm_transfer": 0.03, "barrier": 0.02},
        findings=_unhealthy_findings(),
        notes=[
            "No GPU was found: NVML telemetry is missing, so throttling cannot be told from slow compute."
        ],
        checked=[
            CheckedRule("allreduce/small-buckets", "Gradient buckets are too small"),
            CheckedRule("sync/gradient-accumulation", "Gradients are reduced in every micro-batch"),
        ],
        skipped=[SkippedRule("compute/throttled", "A GPU is throttled", "no GPU telemetry was recorded")],
        ranks=[
            RankSummary(
                rank=0,
                host="node17.cluster.example.com",
                device="cpu",
                step_ms=51.4,
                breakdown_ms={
                    "data_wait": 0.3,
                    "compute": 4.6,
                    "comm_wait": 44.1,
                    "comm_transfer": 1.5,
                    "other": 0.9,
                },
                late_ms=0.0,
                caused_wait_ms=0.0,
            ),
            RankSummary(
                rank=1,
                host="node17.cluster.example.com",
                device="cpu",
                step_ms=51.4,
                breakdown_ms={"data_wait": 45.8, "compute": 4.1, "comm_transfer": 1.1, "other": 0.4},
                late_ms=44.2,
                caused_wait_ms=44.1,
            ),
        ],
        series=Series(steps=steps, ranks=[0, 1], step_ms=step_ms, late_ms=late),
        timeline=_timeline(),
        flames=_flames(),
        waterfall=[
            WaterfallBar("measured step", 51.4),
            WaterfallBar("rank 1 waits for data", 44.8, "dataloader/one-rank-late"),
            WaterfallBar("barrier in every step", 1.2, "sync/barrier"),
            WaterfallBar("could be", 5.4),
        ],
        bandwidth=[
            BandwidthPoint(
                operation="allreduce",
                bytes=2.0**e,
                count=118,
                transfer_ms=0.1 * 2 ** (e - 12) / 64 + 0.1,
                bus_gb_per_s=min(1.9, 0.02 * 2 ** ((e - 10) * 0.7)),
            )
            for e in range(10, 23, 2)
        ],
        telemetry=[
            TelemetrySeries(
                source="node17.cluster.example.com",
                field=field,
                unit=unit,
                t_s=[i * 0.1 for i in range(82)],
                values=[base + 8 * math.sin(i / 5) for i in range(82)],
            )
            for field, unit, base in (("cpu", "percent", 42.0), ("memory_used", "bytes", 6e9))
        ],
        facts={
            "late": {"data": {"ms_per_step": 44.8, "share": 0.87}},
            "loader": {"num_workers": 0},
            "run": RUN,
        },
    )


def _unhealthy_findings() -> list[Finding]:
    return [
        Finding(
            rule="dataloader/one-rank-late",
            severity="critical",
            title="Rank 1 waits 46 ms per step for data; all others wait for it",
            explanation="Rank 1 spends 45.8 ms per step in `next(loader)`, the other rank 0.3 ms.\n\n"
            "DDP's all-reduce cannot end before the last rank arrives, so every rank pays.",
            ranks=[1],
            persistence="always",
            where=[
                Where(
                    "/home/alice/work/train.py",
                    57,
                    "main",
                    0.98,
                    callers=(CodeLine("/home/alice/work/start.py", 9, "<module>"),),
                    text=SourceText(
                        55, ["def main(loader):", "    model.train()", "    for batch in loader:"]
                    ),
                ),
                Where("data/set.py", 12, "__getitem__"),
            ],
            costs_ms_per_step=44.8,
            share=0.872,
            speedup_if_fixed=7.1,
            coverage=Coverage(118, 2),
            evidence=[
                Evidence("late.data.own_ms", 45.8, "ms", "Time that rank 1 waits for data, per step"),
                Evidence("late.data.typical_ms", 0.3, "ms", "Time that the median of the others waits"),
                Evidence("loader.num_workers", 0, "", "DataLoader workers"),
                Evidence("loader.ready_batches", None, "", "Batches that stood ready"),
            ],
            fixes=[
                Fix(
                    title="Load in worker processes",
                    why="With `num_workers=0` the training thread itself reads each batch.",
                    snippet="loader = DataLoader(\n    dataset,\n    batch_size=64,\n    num_workers=4,\n"
                    "    persistent_workers=True,\n    pin_memory=True,\n)",
                    trade_off="Each worker keeps a copy of the dataset object in memory.",
                    docs=["https://docs.pytorch.org/docs/stable/data.html", "javascript:alert(1)"],
                ),
            ],
            limits="If rank 1 reads from a slower disk, more workers hide the wait but do not mend the disk.",
        ),
        Finding(
            rule="sync/barrier",
            severity="info",
            title="A barrier in every step costs 1.2 ms",
            explanation="`dist.barrier()` is called once per step.",
            ranks=None,
            steps=[10, 127],
            persistence="periodic",
            where=[Where("/home/alice/work/train.py", 71, "main")],
            costs_ms_per_step=1.2,
            share=0.023,
            speedup_if_fixed=1.02,
            coverage=Coverage(118, 2),
            caused_by="dataloader/one-rank-late",
            limits="A barrier that guards a file on a shared disk is needed.",
        ),
    ]


def _timeline() -> Timeline:
    spans = []
    for rank, wait in ((0, 0.3), (1, 45.8)):
        spans += [
            Span(rank, "host", "data_wait", "next(loader)", 0.0, wait),
            Span(rank, "compute", "forward", "forward", wait, 1.6),
            Span(rank, "compute", "backward", "backward", wait + 1.6, 2.4),
            Span(rank, "compute", "optimizer", "SGD.step", 50.4, 0.6),
        ]
    spans += [
        Span(0, "communication", "comm_wait", "allreduce", 3.0, 45.0),
        Span(0, "communication", "comm_transfer", "allreduce", 48.0, 2.2),
        Span(1, "communication", "comm_transfer", "allreduce", 48.0, 2.2),
    ]
    return Timeline(step=64, spans=spans, note="A step of median length.")


def _flames() -> list[Flame]:
    train, torch = "/home/alice/work/train.py", "/usr/lib/python3/site-packages/torch"
    places = [
        CodeLine(train, 90, "<module>"),
        CodeLine(train, 57, "main"),
        CodeLine(f"{torch}/utils/data/dataloader.py", 701, "__next__"),
        CodeLine(train, 60, "main"),
        CodeLine(f"{torch}/autograd/graph.py", 841, "_engine_run_backward"),
    ]
    late = [
        FlameFrame(0, 0, 0.0, 51.4, 44.0),
        FlameFrame(1, 1, 0.0, 45.6, 45.3),
        FlameFrame(2, 2, 0.0, 45.0, 44.8),
        FlameFrame(3, 1, 45.6, 5.8, -1.3),
        FlameFrame(4, 2, 45.6, 5.0, -1.0),
    ]
    usual = [
        FlameFrame(0, 0, 0.0, 51.4),
        FlameFrame(3, 1, 0.3, 51.1),
        FlameFrame(4, 2, 0.3, 50.0),
    ]
    told = {"steps": 118, "samples": 610, "mean_ms": 51.4, "places": places}
    return [
        Flame(rank=1, which="all steps", against="rank 0, all steps", frames=late, **told),
        Flame(rank=0, which="all steps", frames=usual, **told),
    ]


def _deep_flames() -> list[Flame]:
    """As many frames as are drawn, with long names."""
    places = [
        CodeLine(f"/home/alice/work/a_rather_long_module_name_{i}.py", i, f"a_function_of_module_{i}")
        for i in range(300)
    ]
    frames = [
        FlameFrame(20 * depth + i, depth, 12.6 * i, 12.6, 0.1 * i) for depth in range(15) for i in range(20)
    ]
    told = {"steps": 400, "samples": 90_000, "mean_ms": 252.0, "places": places, "frames": frames}
    whiches = ("late steps", "other steps", "all steps")
    return [
        Flame(rank=137, which=which, against=None if number else "rank 0, all steps", **told)
        for number, which in enumerate(whiches)
    ]


def healthy() -> Diagnosis:
    """Four ranks without a finding."""
    rng = random.Random(3)
    steps = list(range(200))
    parts = {"data_wait": 0.4, "compute": 92.0, "comm_wait": 1.3, "comm_transfer": 4.0, "other": 1.1}
    return Diagnosis(
        tool_version="0.1.0",
        healthy=True,
        verdict=Verdict(
            None, "Healthy: 24 rules looked at 200 steps on 4 ranks and found nothing worth 5 % of a step"
        ),
        job=Job(
            world_size=4,
            ranks_seen=[0, 1, 2, 3],
            hosts=["gpu01"],
            backend="nccl",
            device="cuda",
            device_names=["NVIDIA H100 80GB HBM3"] * 4,
        ),
        steps=Steps(
            count=210, measured=200, median_ms=98.8, mean_ms=99.0, p95_ms=101.0, samples_per_s=10_341.0
        ),
        breakdown={"compute": 0.93, "comm_transfer": 0.04, "comm_wait": 0.013, "other": 0.017},
        checked=[CheckedRule(f"family/rule-{n}", f"Rule {n}") for n in range(24)],
        ranks=[
            RankSummary(
                rank=r, host="gpu01", device=f"cuda:{r}", step_ms=98.8, breakdown_ms=dict(parts), late_ms=0.1
            )
            for r in range(4)
        ],
        series=Series(
            steps=steps,
            ranks=[0, 1, 2, 3],
            step_ms=[[98.8 + rng.gauss(0, 0.7) for _ in steps] for _ in range(4)],
            late_ms=[[rng.gauss(0, 0.3) for _ in steps] for _ in range(4)],
        ),
        waterfall=[],
    )


def minimal() -> Diagnosis:
    """A diagnosis without findings and almost without data."""
    return Diagnosis(healthy=True, verdict=Verdict(None, "Nothing found"), job=Job(), steps=Steps())


def large(ranks: int = 512, points: int = 400) -> Diagnosis:
    """Many ranks on 64 hosts: ranks 137 and 300 slow in compute, many spans, telemetry of every GPU."""
    rng = random.Random(11)
    slow = {137: 30.0, 300: 12.0}
    numbers = range(ranks)
    steps = [index * 25 for index in range(points)]
    late = [[slow.get(rank, 0.0) + rng.gauss(0, 0.8) for _ in steps] for rank in numbers]
    spans = [
        Span(rank, "compute", "backward", f"kernel_{index}", index * 0.4, 0.35)
        for rank in range(min(ranks, 32))
        for index in range(600)
    ]
    return Diagnosis(
        tool_version="0.1.0",
        healthy=False,
        verdict=Verdict(
            "imbalance/slow-compute", "Rank 137 computes 30 ms longer than the others in every step"
        ),
        job=Job(
            world_size=ranks,
            ranks_seen=list(numbers),
            backend="nccl",
            device="cuda",
            hosts=[f"node{index:03}" for index in range(ranks // 8)],
            device_names=["NVIDIA H100 80GB HBM3"] * ranks,
        ),
        steps=Steps(
            count=10_000,
            measured=9_900,
            median_ms=250.0,
            mean_ms=252.0,
            p95_ms=262.0,
            samples_per_s=131_000.0,
        ),
        breakdown={"compute": 0.8, "comm_wait": 0.12, "comm_transfer": 0.08},
        findings=[
            Finding(
                rule="imbalance/slow-compute",
                severity="warning",
                title="Ranks 137 and 300 compute longer",
                ranks=[137, 300],
                costs_ms_per_step=30.0,
                share=0.12,
                speedup_if_fixed=1.136,
                coverage=Coverage(9_900, ranks),
            ),
        ],
        ranks=[
            RankSummary(
                rank=rank,
                host=f"node{rank // 8:03}",
                device=f"cuda:{rank % 8}",
                step_ms=252.0,
                breakdown_ms={
                    "compute": 200.0 + slow.get(rank, 0.0),
                    "comm_wait": 32.0 - slow.get(rank, 0.0),
                    "comm_transfer": 20.0,
                },
                late_ms=slow.get(rank, 0.0),
                caused_wait_ms=slow.get(rank, 0.0),
            )
            for rank in numbers
        ],
        series=Series(
            steps=steps,
            ranks=list(numbers),
            step_ms=[[252.0 + rng.gauss(0, 3) for _ in steps] for _ in numbers],
            late_ms=late,
        ),
        timeline=Timeline(step=5000, spans=spans),
        flames=_deep_flames(),
        waterfall=[
            WaterfallBar("measured step", 252.0),
            WaterfallBar("ranks 137, 300", 30.0, "imbalance/slow-compute"),
            WaterfallBar("could be", 222.0),
        ],
        telemetry=[
            TelemetrySeries(
                source=f"node{gpu // 8:03} GPU {gpu % 8}",
                field="utilization",
                unit="percent",
                t_s=[i * 10.0 for i in range(200)],
                values=[90 + rng.gauss(0, 3) for _ in range(200)],
            )
            for gpu in range(ranks)
        ],
        facts={"late": {"compute": {"ms_per_step": 30.0}}},
    )


def hostile() -> Diagnosis:
    """Markup wherever a program could put its own text."""
    return Diagnosis(
        tool_version=HOSTILE,
        source=[HOSTILE],
        healthy=False,
        verdict=Verdict("x/y", HOSTILE),
        job=Job(
            hosts=[HOSTILE],
            backend=HOSTILE,
            device=HOSTILE,
            device_names=[HOSTILE],
            command=["python", HOSTILE],
            versions={HOSTILE: HOSTILE},
            settings={HOSTILE: {HOSTILE: HOSTILE}},
            environment={HOSTILE: HOSTILE},
        ),
        steps=Steps(source=HOSTILE, count=1, set_aside={HOSTILE: 1}),
        breakdown={"compute": 1.0},
        findings=[
            Finding(
                rule=HOSTILE,
                severity=HOSTILE,
                title=HOSTILE,
                explanation=HOSTILE,
                persistence=HOSTILE,
                where=[
                    Where(
                        HOSTILE,
                        1,
                        HOSTILE,
                        callers=(CodeLine(HOSTILE, 2, HOSTILE),),
                        text=SourceText(1, [HOSTILE, HOSTILE]),
                    )
                ],
                coverage=Coverage(1, 1),
                evidence=[Evidence(HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
                fixes=[
                    Fix(
                        title=HOSTILE,
                        why=HOSTILE,
                        snippet=HOSTILE,
                        trade_off=HOSTILE,
                        docs=["https://example.org/" + HOSTILE, "javascript:alert(1)", HOSTILE],
                    )
                ],
                caused_by=HOSTILE,
                limits=HOSTILE,
            ),
        ],
        notes=[HOSTILE],
        checked=[CheckedRule(HOSTILE, HOSTILE)],
        skipped=[SkippedRule(HOSTILE, HOSTILE, HOSTILE)],
        ranks=[
            RankSummary(rank=0, host=HOSTILE, device=HOSTILE, breakdown_ms={"compute": 1.0, HOSTILE: 1.0})
        ],
        series=Series(steps=[0, 1], ranks=[0, 1], step_ms=[[1, 2], [2, 1]], late_ms=[[0, 1], [1, 0]]),
        timeline=Timeline(step=0, spans=[Span(0, HOSTILE, HOSTILE, HOSTILE, 0.0, 1.0)], note=HOSTILE),
        flames=[
            Flame(
                rank=0,
                which=HOSTILE,
                steps=1,
                samples=9,
                mean_ms=2.0,
                against=HOSTILE,
                places=[CodeLine(HOSTILE, 1, HOSTILE)],
                frames=[
                    FlameFrame(0, 0, 0.0, 2.0, 1.0),
                    FlameFrame(7, 0, 0.0, 2.0),
                    FlameFrame(0, 10**9, 0.0, 1.0),
                    FlameFrame(0, 1, -5.0, 1.0),
                ],
            )
        ],
        waterfall=[
            WaterfallBar(HOSTILE, 2.0),
            WaterfallBar(HOSTILE, 1.0, HOSTILE),
            WaterfallBar(HOSTILE, 1.0),
        ],
        bandwidth=[BandwidthPoint(operation=HOSTILE, bytes=8, count=1, transfer_ms=1, bus_gb_per_s=1)],
        telemetry=[TelemetrySeries(source=HOSTILE, field=HOSTILE, unit=HOSTILE, t_s=[0, 1], values=[1, 2])],
        facts={HOSTILE: HOSTILE},
        hta={HOSTILE: [{HOSTILE: HOSTILE}], "idle": {HOSTILE: HOSTILE}},
    )


ALL = {"unhealthy": unhealthy, "healthy": healthy, "minimal": minimal, "large": large, "hostile": hostile}
assert set(unhealthy().breakdown) <= set(PARTS)
