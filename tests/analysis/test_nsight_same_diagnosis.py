"""The same job by Nsight Systems: public and made traces are written in its schema, and the diagnosis stays, finding by finding.

What Nsight Systems cannot record is taken out of the traces first, so that both sides know the same: Python frames, annotations on the
device, numbers and names of process groups, instants, and the operator of a kernel whose launch is lost.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.trace import Collectives, RankTrace, find_traces, load_traces
from ddpdoctor.trace.archive import write_archive
from tests.exam.gpu.draw import setup_of
from tests.exam.gpu.simulate import run
from tests.exam.gpu.trace import number_collectives, write
from tests.generator import generate
from tests.generator.cases import case
from tests.net import generated
from tests.trace.nsight_export import NEW, OLD, described, export
from tests.trace.trace_files import SHARED

OPTIONS = Options(cache=False, jobs=1)
RECORDED = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "cpu_op", "user_annotation")
PRICE_MS, PRICE_SHARE = 0.01, 0.001
"""Prices may differ by so much."""

PUBLIC = [
    "torchrec/sst_sleep_pl_dense_after_backward_2",
    "torchrec/sst_long_a2a_optimizer_3",
    "torchrec/sst_long_a2a_optimizer_4",
    "torchrec/sst_long_a2a_optimizer_2__run0",
    "torchrec/resnet18",
    "param/dlrm_8rank",
    "hta/two_of_128_sampled",
    "kineto/resnet50_workers_0",
    "kineto/resnet50_workers_4",
    "hta/nccl_parser_config",
    "hta/trace_diff/control",
    "hta/cpu_only",
    "tracelens/mi300_resnet_act_checkpoint",
]


def known_to_nsight(trace: RankTrace) -> RankTrace:
    """The trace without what Nsight Systems has no event for."""
    kept = np.flatnonzero(trace.category_mask(*RECORDED) & ~_instants(trace))
    place = {int(row): i for i, row in enumerate(kept)}
    told = [(place[kernel], entry) for kernel, entry, *_ in described(trace)]
    entries = [entry for _, entry in told]
    columns = {name: column[entries] for name, column in asdict(trace.collectives).items()}
    columns["event"] = np.array([row for row, _ in told], np.int32)
    collectives = Collectives(**columns)
    collectives.sequence[:] = -1
    rows = ("name", "category", "lane", "start_ns", "duration_ns", "stream", "device", "correlation")
    rows += ("bytes", "shapes")
    return replace(
        trace,
        meta=replace(trace.meta, process_groups=(), notes=(), torch_version=None),
        collectives=collectives,
        external_id=np.full(len(kept), -1, np.int64),
        **{name: getattr(trace, name)[kept] for name in rows},
    )


def _instants(trace: RankTrace):
    return (trace.duration_ns == 0) & trace.category_mask("cpu_op", "user_annotation")


def both(traces: list[RankTrace], folder: Path, schema: str) -> tuple[Diagnosis, Diagnosis]:
    """(By torch's profiler, by Nsight Systems)."""
    ours, theirs = folder / "columns", folder / "nsight"
    ours.mkdir()
    theirs.mkdir()
    for number, trace in enumerate(map(known_to_nsight, traces)):
        rank = trace.meta.rank
        name = "trace" if rank is None else f"rank{rank}"
        with (ours / f"{number}_{name}.columns").open("wb") as stream:
            write_archive(stream, trace)
        said = {"RANK": rank, "WORLD_SIZE": trace.meta.world_size}
        environment = {key: str(value) for key, value in said.items() if value is not None}
        export(theirs / f"{number}_{name}.sqlite", [trace], schema, environment=environment)
    return analyze([str(ours)], OPTIONS), analyze([str(theirs)], OPTIONS)


def assert_same(ours: Diagnosis, theirs: Diagnosis) -> None:
    """Verdict and findings are the same, prices and breakdown nearly."""
    assert [(f.rule, f.ranks) for f in theirs.findings] == [(f.rule, f.ranks) for f in ours.findings]
    assert theirs.verdict.rule == ours.verdict.rule and theirs.healthy == ours.healthy
    assert theirs.steps.count == ours.steps.count
    assert theirs.steps.median_ms == pytest.approx(ours.steps.median_ms, rel=0.001, abs=0.001)
    for mine, other in zip(ours.findings, theirs.findings, strict=True):
        if mine.costs_ms_per_step is None:
            assert other.costs_ms_per_step is None
        else:
            near = pytest.approx(mine.costs_ms_per_step, rel=PRICE_SHARE, abs=PRICE_MS)
            assert other.costs_ms_per_step == near, mine.rule
    for part, share in ours.breakdown.items():
        assert theirs.breakdown[part] == pytest.approx(share, abs=0.02), part


def traces_of(folder: Path) -> list[RankTrace]:
    return load_traces(find_traces([str(folder)]).files, jobs=1).traces


@pytest.mark.extended
@pytest.mark.parametrize("name", PUBLIC)
def test_public_traces(name, tmp_path):
    if not (SHARED / name).exists():
        pytest.skip("the public traces are not here")
    assert_same(*both(traces_of(SHARED / name), tmp_path, NEW))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["torchrec/sst_long_a2a_optimizer_3", "param/dlrm_8rank"])
def test_public_traces_in_an_old_schema(name, tmp_path):
    if not (SHARED / name).exists():
        pytest.skip("the public traces are not here")
    traces = [replace(t, meta=replace(t.meta, devices=())) for t in traces_of(SHARED / name)]
    ours, theirs = both(traces, tmp_path, OLD)
    assert_same(ours, theirs)
    assert theirs.job.ranks_seen == ours.job.ranks_seen, "by the names of the files"


MADE = [name for name in generated.names() if name.startswith("trace-")]
CHOSEN = MADE[2::25]


def made_traces(name: str, folder: Path) -> list[RankTrace]:
    return traces_of(generated.make(name, folder / "made"))


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.extended
def test_made_traces(name, tmp_path):
    assert_same(*both(made_traces(name, tmp_path), tmp_path, NEW))


def test_a_made_job_in_an_old_schema(tmp_path):
    generate(case("A").config, tmp_path / "made")
    traces = [replace(t, meta=replace(t.meta, devices=())) for t in traces_of(tmp_path / "made")]
    ours, theirs = both(traces, tmp_path, OLD)
    assert_same(ours, theirs)
    assert theirs.job.ranks_seen == ours.job.ranks_seen, "by the names of the files"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MADE if name not in CHOSEN])
def test_all_made_traces(name, tmp_path):
    assert_same(*both(made_traces(name, tmp_path), tmp_path, NEW))


@pytest.mark.parametrize(
    "seed", [8803, 8829, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (8811, 8817))]
)
def test_jobs_of_another_simulator(seed, tmp_path):
    setup = setup_of(seed)
    ranks = run(setup)
    number_collectives(ranks)
    write(setup, ranks, tmp_path / "made")
    assert_same(*both(traces_of(tmp_path / "made"), tmp_path, NEW))


@pytest.mark.extended
def test_all_ranks_of_a_host_in_one_file(tmp_path):
    """As where Nsight Systems runs torchrun on two hosts whose clocks differ: the processes are told apart, numbered by torchrun's
    options, and put on one clock."""
    made = case("A", drift_ppm=20.0)
    generate(made.config, tmp_path / "made")
    config = made.config
    traces = [
        replace(trace, meta=replace(trace.meta, host=f"node{config.host_of(trace.meta.rank or 0)}"))
        for trace in traces_of(tmp_path / "made")
    ]
    (tmp_path / "reports").mkdir()
    for node in (0, 1):
        own = [trace for trace in map(known_to_nsight, traces) if trace.meta.host == f"node{node}"]
        command = f"torchrun --nnodes=2 --node-rank {node} --nproc-per-node {len(own)} train.py"
        export(tmp_path / "reports" / f"report{node}.sqlite", own, command=command)
    ours, _ = both(traces, tmp_path, NEW)
    theirs = analyze([str(tmp_path / "reports")], OPTIONS)
    assert_same(ours, theirs)
    assert theirs.job.ranks_seen == ours.job.ranks_seen == [0, 1, 2, 3]
    assert theirs.job.world_size == 4 and theirs.findings[0].ranks == [made.culprit]
