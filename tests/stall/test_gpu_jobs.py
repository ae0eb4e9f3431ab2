"""Verdicts on run directories of GPU jobs: errors of devices and of programs on them, and hosts that run ahead of their devices."""

from __future__ import annotations

import json

import pytest

from .recorded import NOW_NS, TORCH, TRAIN, Stopped, main_finding
from .test_run_verdicts import FUTEX, diagnosed, hung


def on_gpus(run: Stopped, *xids: list[int]) -> Stopped:
    """Rank 1 ran on the only GPU, on which these errors came."""
    return on_gpus_of(run, 1, *xids)


def on_gpus_of(run: Stopped, rank: int, *xids: list[int]) -> Stopped:
    path = run.path / f"ranks/{rank:05d}/rank.json"
    info = json.loads(path.read_text()) | {"device": "cuda:0", "backend": "nccl"}
    path.write_text(json.dumps(info))
    header = {
        "schema": "ddpdoctor.telemetry/2",
        "host": info["host"],
        "started_ns": 1,
        "gpus": [{"index": 0}],
    }
    samples = [
        {"t_ns": NOW_NS - 10**10 + n, "gpus": [{"index": 0, "xid_errors": xid}]} for n, xid in enumerate(xids)
    ]
    for folder in (run.path / "hosts").iterdir():
        (folder / "telemetry.jsonl").write_text("\n".join(map(json.dumps, [header, *samples])) + "\n")
    return run


@pytest.mark.parametrize(
    ("xids", "rule"), [(([], [79]), "hang/device-error"), (([], []), "hang/not-reached")]
)
def test_errors_counted_on_the_device_of_the_rank_that_does_not_come(tmp_path, xids, rule):
    run = hung(tmp_path, [[TRAIN, 57, "load"]], FUTEX)
    diagnosis = diagnosed(on_gpus(run, *xids))
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == (rule, [1], 57)
    if xids[1]:
        assert diagnosis.facts["hang"]["device"]["message"] == "Xid 79"


def test_errors_on_another_device_are_told_and_accuse_nobody(tmp_path):
    run = Stopped(tmp_path / "run").raised(0, "ValueError", "bad sample 17").ended(0, code=1)
    diagnosis = diagnosed(on_gpus(run, [], [79]))
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks) == ("hang/rank-raised", [0])
    assert "Xid 79" in finding.explanation


FULL = (
    "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 139.80 GiB of which 127.39 GiB is free. Process 601 has "
    "2.22 GiB memory in use. Including non-PyTorch memory, this process has 1.28 GiB memory in use. Process 619 has 512.00 MiB memory in "
    "use. Of the allocated memory 117.85 MiB is allocated by PyTorch, and 48.15 MiB is reserved by PyTorch but unallocated. If reserved "
    "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize(("tried", "oversized"), [("1024.00", True), ("130.00", False)])
def test_full_memory_is_what_the_rank_raised_whatever_xid_a_program_left(tmp_path, tried, oversized):
    run = Stopped(tmp_path / "run").raised(1, "torch.OutOfMemoryError", FULL.format(tried)).ended(1, code=1)
    diagnosis = diagnosed(on_gpus(run, [], [43]))
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks) == ("hang/rank-raised", [1])
    assert all(each.rule != "gpu/hardware-errors" for each in diagnosis.findings)
    assert (
        f"Tried to allocate {tried} GiB. GPU 0 has a total capacity of 139.80 GiB of which 127.39 GiB is free"
        in finding.explanation
    )
    held = "The process itself held 1.28 GiB, of which tensors took 117.85 MiB and torch's cache 48.15 MiB. 2 other processes"
    assert held in finding.explanation and "the largest 2.22 GiB" in finding.explanation
    assert ("more than the whole device" in finding.explanation) is oversized
    assert (finding.fixes[0].title == "Less device memory per step") is not oversized
    assert "Xid" not in finding.explanation


@pytest.mark.parametrize(
    ("xid", "signal", "later_s", "rule"),
    [
        (43, 6, 1, "device-error"),
        (43, 6, 60, "rank-died"),
        (43, 11, 1, "rank-died"),
        (79, 6, 60, "device-error"),
        (None, 6, 1, "rank-died"),
    ],
)
def test_a_rank_that_aborts_and_an_xid_on_its_device(tmp_path, xid, signal, later_s, rule):
    """torch's C++ ends the process where it meets a failed kernel's error outside of Python's calls."""
    run = Stopped(tmp_path / "run").ended(1, signal=signal, seen_ns=NOW_NS - 10**10 + later_s * 10**9)
    diagnosis = diagnosed(on_gpus(run, [], [] if xid is None else [xid]))
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks) == (f"hang/{rule}", [1])
    if xid == 43 and rule == "device-error":
        assert diagnosis.facts["hang"]["device"]["fault"] == "program"
        assert diagnosis.verdict.headline.startswith("The job failed: a kernel of rank 1 failed")
        assert [fix.title for fix in finding.fixes] == ["Find the failing kernel"]
    elif xid == 79:
        assert diagnosis.facts["hang"]["device"]["fault"] == "hardware"
        assert [fix.title for fix in finding.fixes] == ["Take the GPU out of service and test it"]
    assert finding.explanation.count(f"Xid {xid}") <= 2


def test_an_assertion_of_a_kernel_is_named_without_torchs_advice(tmp_path):
    message = (
        "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/x.html for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    )
    run = Stopped(tmp_path / "run").raised(1, "torch.AcceleratorError", message).ended(1, code=1)
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks) == ("hang/device-error", [1])
    assert (
        "torch.AcceleratorError: CUDA error: device-side assert triggered at"
        in finding.explanation.replace("  ", " ")
    )
    assert [fix.title for fix in finding.fixes] == ["Find the failing kernel"]


BEHIND = [[f"{TORCH}/nn/modules/conv.py", 548, "_conv_forward"], [TRAIN, 84, "forward"], [TRAIN, 90, "main"]]
AHEAD = {"step": 103, "groups": {"0": [210, -1, 206]}}
ASLEEP = {"step": 100, "groups": {"0": [206, -1, 206]}}


def on_nccl(tmp_path, name: str = "standing") -> Stopped:
    """Rank 0's host is three steps ahead of its device, which waits for rank 1."""
    run = Stopped(tmp_path / "run").rank(0, "forward", BEHIND, name, **AHEAD)
    for rank in (0, 1):
        path = run.path / f"ranks/{rank:05d}/rank.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"backend": "nccl"}))
    return run.rank(1, "other", [[TRAIN, 57, "load"], [TRAIN, 90, "main"]], name, **ASLEEP)


def test_a_rank_whose_host_runs_ahead_waits_for_the_one_that_sleeps(tmp_path):
    run = on_nccl(tmp_path).seen(0, {"state": "R", "wchan": "0", "tracer": 0}, waits=True, computes=False)
    diagnosis = diagnosed(
        run.seen(1, {"state": "S", "wchan": "hrtimer_nanosleep"}, waits=False).stall("lasts")
    )
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 57)
    assert diagnosis.facts["hang"]["not_reached"]["step"] == 100
    assert "last seen: rank 1 sleeps at train.py:57 in load; rank 0 waits" in diagnosis.verdict.headline


@pytest.mark.parametrize("xid", [None, 43])
@pytest.mark.parametrize("waited_s", [85, 2])
def test_a_rank_that_nccls_watchdog_ended_waited_for_the_one_that_sleeps(tmp_path, xid, waited_s):
    """No hang was reported: the timeout was shorter than the time after which one is."""
    run = on_nccl(tmp_path, "progress")
    for rank, state in ((0, AHEAD), (1, ASLEEP)):
        frames = BEHIND if rank == 0 else [[TRAIN, 57, "load"], [TRAIN, 90, "main"]]
        since = {"step_since_ns": NOW_NS - waited_s * 10**9, "at_ns": NOW_NS - 10**9}
        run.rank(rank, "other" if rank else "forward", frames, "progress", **state, **since)
    run.ended(0, signal=6, seen_ns=NOW_NS).ended(1, signal=15, seen_ns=NOW_NS + 10**8)
    finding = main_finding(diagnosed(run if xid is None else on_gpus_of(run, 0, [xid])))
    if xid is None and waited_s == 85:
        assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 57)
    else:
        assert (finding.rule, finding.ranks) == (
            "hang/rank-died" if xid is None else "hang/device-error",
            [0],
        )


def test_a_broadcast_where_the_others_reduce_on_nccl(tmp_path):
    """Both hosts wait on their devices; that of rank 0 has issued four more reductions."""
    reductions = [("all_reduce", 592_704), ("all_reduce", 296_010)] * 10
    run = on_nccl(tmp_path).flight(0, [*reductions[:7], *reductions[1:5]], 4, "nccl")
    run.rank(
        1,
        "other",
        [["/venv/torch/cuda/__init__.py", 1162, "synchronize"], [TRAIN, 54, "fail_at"]],
        groups={"0": [8, -1, 6]},
    )
    run.flight(1, [*reductions[:7], ("broadcast", 64)], 2, "nccl")
    run.seen(0, {"state": "R"}, waits=True).seen(1, {"state": "R"}, waits=True)
    diagnosis = diagnosed(run.stall("ended"))
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/different-collectives", [1], 54)
    different = diagnosis.facts["hang"]["different"]
    assert (different["collective"], different["sequence"]) == ("all_reduce", 8)
    assert different["unlike"] == "broadcast of 64 Float"


@pytest.mark.parametrize("counted", [True, False])
def test_calls_that_returned_and_are_not_complete_on_their_devices(tmp_path, counted):
    """NCCL's watchdog ended rank 1 before a hang was reported; both ranks' calls had returned long before."""
    run = Stopped(tmp_path / "run")
    for rank, groups in ((0, {"0": [210, -1, 206]}), (1, {"0": [207, -1, 205]})):
        frames = [[TRAIN, 84 if rank == 0 else 54, "forward"], [TRAIN, 90, "main"]]
        more = {"groups": groups if counted else {}, "at_ns": NOW_NS - 10**9, "step": 100 + 2 * (1 - rank)}
        run.rank(rank, "other" if rank else "forward", frames, "progress", **more)
        reductions = [
            {"open": 0, "call": n, "n": n, "p": n - 1, "pp": n - 2, "step": n - 1, "k": "bwd", "pg": "0"}
            for n in range(95, 102 + 2 * (1 - rank))
        ]
        other = {
            "open": 0,
            "call": 102,
            "n": 102,
            "step": 100,
            "k": "coll",
            "op": "broadcast",
            "pg": "0",
            "b": 256,
        }
        rows = [*reductions, *([other] if rank else [])]
        (run.path / f"ranks/{rank:05d}/calls.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    run.ended(1, signal=6, seen_ns=NOW_NS).ended(0, signal=15, seen_ns=NOW_NS + 10**8)
    finding = main_finding(diagnosed(run))
    wanted = "hang/different-collectives" if counted else "hang/rank-died"
    assert (finding.rule, finding.ranks) == (wanted, [1])
    assert ("broadcast of 256 bytes" in finding.title) is counted
