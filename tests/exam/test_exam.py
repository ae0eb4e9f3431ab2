"""The exam itself: programs and traces, ground truth, marks, and the command."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.exam import planted
from tests.exam.__main__ import each_kind, examined, main, simulated
from tests.exam.gpu.draw import ONE_RANK, case_of, setup_of
from tests.exam.gpu.simulate import Planned, Setup, run, step_us
from tests.exam.gpu.trace import document, number_collectives
from tests.exam.page import HEAD, page
from tests.exam.planted import Case, Fault
from tests.exam.real import draw
from tests.exam.real.draw import program
from tests.exam.real.kinds import KINDS, TRAPS, Asked
from tests.exam.real.record import RUN, record, truth
from tests.exam.real.twin import all_sure, is_sure
from tests.exam.score import mark

JOB = setup_of(5003)
"""An arbitrary job."""


def _with(kind: str, us: float, every: int = 1) -> Setup:
    ranks = (1,) if kind in ONE_RANK else None
    return dataclasses.replace(JOB, reads_loss=True, faults=(Planned(kind, ranks, us, every),))


def test_a_seed_always_draws_the_same_job() -> None:
    assert setup_of(77) == setup_of(77) != setup_of(78)


@pytest.mark.parametrize(
    ("kind", "us"),
    [("slow-kernels", 4e3), ("late-data", 4e3), ("extra-after", 4e3), ("small-buckets", 120), ("syncs", 1e3)],
)
def test_a_job_without_its_fault_equals_the_healthy_job_and_is_faster(kind: str, us: float) -> None:
    setup = _with(kind, us)
    without, twin = run(setup, ()), run(dataclasses.replace(setup, faults=()))
    assert [rank.events for rank in without] == [rank.events for rank in twin]
    assert step_us(run(setup), 3, 5) > step_us(twin, 3, 5)


def test_slow_kernels_of_one_rank_cost_their_extra_time() -> None:
    quiet = {
        "kernel_noise": 0.0,
        "host_noise": 0.0,
        "latency_us": 0.0,
        "bytes_per_us": 1e12,
        "end_spread": 0.0,
    }
    exact = dataclasses.replace(JOB, reads_loss=True, **quiet)  # type: ignore[arg-type]
    slower = Planned("slow-kernels", (1,), 5000.0)
    longer = step_us(run(exact, (slower,)), 3, 6) - step_us(run(exact, ()), 3, 6)
    assert longer == pytest.approx(5000.0, rel=0.01)


def test_kernels_of_a_stream_do_not_overlap_and_follow_their_launch() -> None:
    for rank in run(_with("extra-forward", 3e3)):
        launched = {event.correlation: event.end for event in rank.events if event.category == "cuda_runtime"}
        compute = [event for event in rank.events if event.category == "kernel" and event.thread == 7]
        for one, after in itertools.pairwise(compute):
            assert one.end <= after.start and after.start > launched[after.correlation]


def test_a_trace_contains_only_what_its_settings_record() -> None:
    kernels = dataclasses.replace(
        JOB.recorded, operators=False, stacks=False, runtime=False, step_annotations=False
    )
    setup = dataclasses.replace(JOB, recorded=kernels)
    ranks = run(setup)
    number_collectives(ranks)
    events = [event for event in document(setup, ranks[0])["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} <= {"kernel", "gpu_memcpy"} and events


@pytest.mark.parametrize("asked", [None, *(Asked(kind) for kind in KINDS), *TRAPS.values()])
def test_programs_are_valid_python_and_the_lines_of_faults_are_known(
    asked: Asked | None, tmp_path: Path
) -> None:
    for seed in range(3 if asked else 60):
        drawn = program(seed, tmp_path / str(seed), asked)
        texts = {file.name: file.read_text() for file in (tmp_path / str(seed)).glob("*.py")}
        for text in texts.values():
            ast.parse(text)
            assert "@{" not in text and "#@" not in text
        for fault in drawn.faults:
            assert not fault.with_line or drawn.lines[fault.key], fault
            # A fault is removed by setting its amount to 0.
            assert any(
                f"amount({quote}{fault.key}{quote})" in text for text in texts.values() for quote in "\"'"
            )
        assert asked is None or [fault.kind for fault in drawn.faults] == ([asked.kind] if asked.kind else [])


def test_seeds_draw_no_kinds_of_weight_0(tmp_path: Path) -> None:
    drawn = {fault.kind for seed in range(200) for fault in program(seed, tmp_path / "p").faults}
    assert drawn and all(KINDS[kind].weight for kind in drawn)


def test_each_kind_each_trap_and_both_links_have_a_named_job() -> None:
    names = [name for name, _ in each_kind(1)]
    assert sorted(names) == sorted([*KINDS, *TRAPS, "slow-link", "trap-fast-link"])


def test_the_price_is_the_median_difference_and_noise_is_a_doubt(tmp_path: Path) -> None:
    seed = next(
        seed for seed in range(200) if [f.kind for f in program(seed, tmp_path / "p").faults] == ["host-one"]
    )
    drawn = program(seed, tmp_path / "p")
    steady = {"base_ms": 30.0, "blocks": {"all": [[40.0] * 8] * 3, "without a": [[30.0] * 8] * 3}}
    case = truth(drawn, steady, {})
    assert case.faults[0].price_ms == 10.0 and not case.doubts
    noisy = {
        "base_ms": 30.0,
        "blocks": {"all": [[40.0] * 8, [48.0] * 8, [37.0] * 8], "without a": [[30.0] * 8] * 3},
    }
    assert truth(drawn, noisy, {}).doubts[0].startswith("noisy: host-one ")
    unsure = {"base_ms": 30.0, "blocks": {**steady["blocks"], "all": [[45.0] * 8, [48.0] * 8, [47.0] * 8]}}
    assert truth(drawn, unsure, {}).doubts[0].startswith("noisy: host-one "), (
        "sure to a quarter, not to a tenth of the step"
    )
    case.write(tmp_path)
    assert planted.read(tmp_path) == case


@pytest.mark.parametrize(("scatter_ms", "least", "most"), [(0.2, 3, 3), (4.0, 4, 40), (20.0, 200, 200)])
def test_rounds_continue_until_the_price_is_sure_to_a_tenth_of_the_step(
    scatter_ms: float, least: int, most: int
) -> None:
    chance = random.Random(1)
    blocks: dict[str, list[list[float]]] = {"all": [], "without a": [], "without b": [], "none": []}
    took_ms = dict(zip(blocks, (60.0, 50.0, 45.0, 30.0), strict=True))
    rounds = 0
    while rounds < 3 or (rounds < 200 and not all_sure(blocks, steady=True)):
        rounds += 1
        for name, ms in took_ms.items():
            blocks[name].append([ms + scatter_ms * chance.gauss(0, 1)] * 8)
    assert least <= rounds <= most


def test_the_interval_of_a_sure_price_has_90_percent_coverage() -> None:
    """This holds although the rounds end as soon as the price is sure."""
    chance = random.Random(2)
    held = []
    for _ in range(500):
        saved = [10.0 + 2.5 * chance.gauss(0, 1) for _ in range(3)]
        while not is_sure(saved, 60.0) and len(saved) < 30:
            saved.append(10.0 + 2.5 * chance.gauss(0, 1))
        if is_sure(saved, 60.0):
            held.append(abs(median(saved) - 10.0) <= 0.05 * 60.0)
    assert len(held) > 400 and sum(held) >= 0.9 * len(held)


@pytest.mark.parametrize(("alone_ms", "doubted"), [(10.0, False), (30.0, False), (2.0, True)])
def test_two_faults_are_timed_together_and_each_alone(alone_ms: float, doubted: bool, tmp_path: Path) -> None:
    seed = next(seed for seed in range(200) if len(program(seed, tmp_path / "p").faults) == 2)
    drawn = program(seed, tmp_path / "p")
    one, other = drawn.faults
    took_ms = {
        "all": 60.0,
        f"without {one.key}": 50.0,
        f"without {other.key}": 25.0 + alone_ms,
        "none": 25.0,
    }
    blocks = {name: [[ms] * 8] * 3 for name, ms in took_ms.items()}
    case = truth(drawn, {"base_ms": 25.0, "blocks": blocks}, {})
    assert (case.faults[0].price_ms, case.faults[0].alone_ms, case.joint_ms) == (10.0, alone_ms, 35.0)
    assert any(each.startswith(f"noisy: {one.kind} ") for each in case.doubts) == doubted


FAULT = Fault("host-one", ("rank-imbalance/host-work",), (1,), 10.0, (("train.py", 7),))
FINDING = {
    "rule": "rank-imbalance/host-work",
    "severity": "critical",
    "ranks": [1],
    "where": [{"file": "/job/train.py", "line": 7}],
    "costs_ms_per_step": 12.0,
}


def test_the_range_is_compared_with_a_cost_that_was_measured_with_an_error() -> None:
    finding = {**FINDING, "costs_ms_per_step_range": [10.5, 13.0]}
    diagnosis = {"job": {"ranks_seen": [0, 1]}, "steps": {"mean_ms": 40.0}, "findings": [finding]}
    right = {
        error_ms: mark(
            Case(1, "real", 40.0, (dataclasses.replace(FAULT, error_ms=error_ms),)), diagnosis
        ).right["range"]
        for error_ms in (0.0, 0.5, 1.0)
    }
    # Half of the range is 1.5 ms, 0.5 ms too short; with the error it is hypot(1.5, 1.64 x error).
    assert right == {0.0: 0, 0.5: 0, 1.0: 1}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, set()),
        ({"rule": "dataloader/starved"}, {"rule", "silence"}),
        ({"ranks": [0]}, {"rank", "silence"}),
        ({"where": [{"file": "train.py", "line": 9}]}, {"line"}),
        ({"costs_ms_per_step": 14.0}, {"price"}),
        ({"costs_ms_per_step_range": [11.0, 13.0]}, {"range"}),
        ({"severity": "info"}, {"rule"}),
    ],
)
def test_wrong_answers_are_marked_wrong(change: dict[str, Any], wrong: set[str]) -> None:
    case = Case(1, "real", 40.0, (FAULT,))
    diagnosis = {
        "job": {"ranks_seen": [0, 1]},
        "steps": {"mean_ms": 40.0},
        "findings": [{**FINDING, **change}],
    }
    marked = mark(case, diagnosis)
    assert {what for what in marked.asked if marked.right[what] < marked.asked[what]} == wrong
    predicted_ms = 40.0 - FINDING["costs_ms_per_step"] if not change else None
    assert predicted_ms is None or marked.without_ms == ((30.0, predicted_ms),)


ONE = Fault("host-one", ("rank-imbalance/host-work",), (1,), 0.1, alone_ms=10.0)
OTHER = Fault("forward-one", ("rank-imbalance/slow-compute",), (0,), 0.2, alone_ms=10.1)
HIDDEN = Case(
    1, "real", 40.0, (ONE, OTHER), doubts=("cheap: host-one x", "cheap: forward-one x"), joint_ms=10.2
)
"""Two late ranks that hide each other: fixing either alone saves nothing."""


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        ({1: 6.0, 0: 5.0}, set()),
        ({1: 9.0}, set()),
        ({}, {"rule"}),
        ({1: 16.0}, {"price"}),
    ],
)
def test_findings_on_faults_that_hide_each_other_are_no_false_positives(
    told: dict[int, float], wrong: set[str]
) -> None:
    rules = {1: "rank-imbalance/host-work", 0: "rank-imbalance/slow-compute"}
    findings = [
        {**FINDING, "rule": rules[rank], "ranks": [rank], "costs_ms_per_step": ms}
        for rank, ms in told.items()
    ]
    diagnosis = {"job": {"ranks_seen": [0, 1]}, "steps": {"mean_ms": 40.0}, "findings": findings}
    marked = mark(HIDDEN, diagnosis)
    assert {what for what in marked.asked if marked.right[what] < marked.asked[what]} == wrong


def test_a_fault_without_cost_may_be_reported_but_not_with_a_high_price() -> None:
    idle = Case(1, "real", 40.0, (dataclasses.replace(FAULT, price_ms=0.1),), doubts=("cheap: host-one x",))
    job = {"job": {"ranks_seen": [0, 1]}, "steps": {"mean_ms": 40.0}}
    assert not mark(idle, {**job, "findings": [{**FINDING, "costs_ms_per_step": 2.0}]}).misses
    (miss,) = mark(idle, {**job, "findings": [FINDING]}).misses
    assert miss.startswith("price: ")


def test_two_simulated_faults_have_prices_alone_and_together() -> None:
    faults = (Planned("host-stall", (0,), 4e3), Planned("slow-kernels", (1,), 4e3))
    case, _ = case_of(dataclasses.replace(JOB, reads_loss=True, faults=faults))
    assert case.joint_ms is not None
    for fault in case.faults:
        assert fault.alone_ms is not None
        assert fault.price_ms <= fault.alone_ms + 0.01 and fault.alone_ms <= case.joint_ms + 0.01


def test_a_communication_bound_healthy_job_may_be_reported_as_such() -> None:
    quick = dataclasses.replace(JOB, bytes_per_us=1e9, latency_us=1.0, faults=())
    slow = dataclasses.replace(quick, bytes_per_us=sum(JOB.layer_bytes) / (3 * sum(JOB.layers_us)))
    assert "allreduce/communication-bound" in case_of(slow)[0].tolerated
    assert "allreduce/communication-bound" not in case_of(quick)[0].tolerated


def test_a_finding_in_a_healthy_run_is_a_false_positive() -> None:
    diagnosis = {"job": {"ranks_seen": [0, 1]}, "steps": {"mean_ms": 40.0}, "findings": [FINDING]}
    assert mark(Case(1, "real", 40.0, ()), diagnosis).misses
    trapped = mark(Case(1, "named", 40.0, (), trap="trap-warm-up"), diagnosis)
    assert trapped.misses and trapped.kinds == ("trap-warm-up",)
    assert "1 of them healthy; 1 of the healthy ones got a false positive" in page([trapped])


@pytest.mark.parametrize("faulty", [False, True])
def test_a_generated_case_is_marked_kept_and_marked_again(
    faulty: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = next(seed for seed in range(5100, 5200) if bool(setup_of(seed).faults) == faulty)
    assert bool(case_of(setup_of(seed))[0].faults) == faulty
    _, folder, _ = simulated(seed, tmp_path)
    first, again, text = tmp_path / "first.json", tmp_path / "again.json", tmp_path / "exam.md"
    assert main(["--seed", str(seed), "--generated", "1", "--json", str(first)]) == 0
    assert folder.name == f"generated-{seed}"
    assert main(["--judge", str(tmp_path), "--json", str(again)]) == 0
    assert json.loads(first.read_text()) == json.loads(again.read_text())
    assert main(["--marks", str(first), "--write", str(text)]) == 0
    assert capsys.readouterr().out.count("generated: 1 cases") == 3
    assert f"1 cases from seeds {seed} to {seed}" in text.read_text()


def test_the_page_begins_with_the_description() -> None:
    assert (Path(__file__).parents[2] / "docs" / "exam.md").read_text().startswith(HEAD)


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("faulty", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_real_case_is_recorded_and_marked(
    faulty: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "RECORDED_S", 1.0)
    monkeypatch.setattr(draw, "TIMED_S", 0.5)
    kinds = [["host-one"]] if faulty else [[]]
    seed = next(
        seed
        for seed in range(300, 400)
        if [fault.kind for fault in program(seed, tmp_path / "p").faults] in kinds
    )
    kept, marks = tmp_path / "kept", tmp_path / "marks.json"
    assert main(["--seed", str(seed), "--real", "1", "--record", str(kept)]) == 0
    assert main(["--judge", str(kept), "--json", str(marks)]) == 0
    assert "real: 1 cases" in capsys.readouterr().out
    (case,) = json.loads(marks.read_text())["cases"]
    assert (case["seed"], case["half"], bool(case["kinds"])) == (seed, "real", faulty)


@pytest.mark.torchrun
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data-one", "forward-one", "host-one"])
def test_a_large_fault_is_reported(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault takes half of the step, so that this holds on any machine."""
    monkeypatch.setattr(draw, "MIN_SHARE", 0.5)
    monkeypatch.setattr(draw, "MAX_SHARE", 0.5)
    monkeypatch.setattr(draw, "TIMED_S", 0.5)
    case = dataclasses.replace(record(1, tmp_path / "case", Asked(kind)), doubts=())
    marked = examined(case, tmp_path / "case" / RUN)
    assert all(marked.right[what] == marked.asked[what] == 1 for what in ("rule", "rank", "line")), marked
