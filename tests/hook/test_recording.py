"""What a plain DDP job records, and that it is the job's own doing that is recorded."""

from __future__ import annotations

import gzip
import json
import sys
import sysconfig
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from ddpdoctor.hook.job import CodeKinds, Lines, input_elements, tensor_bytes
from ddpdoctor.rundir.stepevents import EventKind, LineField, Mark
from tests.python import NEEDS_STACKS
from tests.rundir.stepfields import COMMON_FIELDS, FIELDS_OF

from .recording import JOBS, HookOptions, Recorded, forked, one_rank, plain_environment, run_recorded


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    tmp = tmp_path_factory.mktemp("slow")
    command = forked(
        "plain_ddp.py", "--steps", "24", "--slow-rank", "1", "--slow-ms", "40", "--workers", "1", "--barrier"
    )
    base = plain_environment(NCCL_DEBUG="WARN", MY_API_TOKEN="secret", NCCL_AUTH_TOKEN="secret")
    base["NCCL_PROXY"] = "http://me:secret@proxy"
    return run_recorded(tmp, [*command, "--exit-hard"], HookOptions(profile_steps=(8, 11)), base)


@pytest.mark.torchrun
def test_every_step_and_its_parts_are_there(slow_rank: Recorded) -> None:
    assert slow_rank.process.returncode == 0, slow_rank.process.stderr
    assert slow_rank.folders() == ["00000", "00001"]
    for rank in (0, 1):
        assert slow_rank.lines(rank)[0] == {"schema": "ddpdoctor.steps/2"}
        steps = slow_rank.steps(rank)
        assert [step["step"] for step in steps] == list(range(24))
        for step in steps[4:]:
            if step.get("thin"):
                continue
            kinds = [event["k"] for event in step["ev"]]
            assert {"data", "fwd", "bwd", "opt", "bar"} <= set(kinds)
            assert [event["s"] for event in step["ev"]] == sorted(event["s"] for event in step["ev"])
            duration = step["t"][1] - step["t"][0]
            assert all(event["s"] >= 0 and event["s"] + event["d"] <= duration for event in step["ev"])
    data = slow_rank.events(0, "data")
    assert {event["n"] for event in data if not event.get("end")} == {8} and all(
        "q" in event for event in data
    )


@pytest.mark.torchrun
def test_the_schema_has_every_word_of_the_log(slow_rank: Recorded) -> None:
    for line in [*slow_rank.lines(0), *slow_rank.lines(1)]:
        assert set(line) <= set(LineField) and set(line.get("marks", [])) <= set(Mark)
        for event in line.get("ev", []):
            assert set(event) <= {*COMMON_FIELDS, *FIELDS_OF[EventKind(event["k"])]}, event


@pytest.mark.torchrun
def test_readiness_of_gradients_names_the_late_rank(slow_rank: Recorded) -> None:
    arrivals: list[dict[int, int]] = []
    for rank in (0, 1):
        found = {}
        for step in slow_rank.steps(rank):
            for event in step.get("ev", []):
                if event["k"] == "bwd" and event["sync"]:
                    found[step["step"]] = step["t"][0] + event["base"] + max(event["ready"])
        arrivals.append(found)
    common = sorted(set(arrivals[0]) & set(arrivals[1]))[4:]
    late = [arrivals[1][step] - arrivals[0][step] for step in common]
    assert len(late) >= 10 and sorted(late)[len(late) // 2] > 25_000_000


@pytest.mark.torchrun
@NEEDS_STACKS
def test_source_lines_are_the_scripts(slow_rank: Recorded) -> None:
    lines = {line["where"]: line for line in slow_rank.lines(1) if "where" in line}
    text = (JOBS / "plain_ddp.py").read_text().splitlines()
    for kind, code in (("bwd", "loss.backward()"), ("opt", "optimizer.step()"), ("bar", "dist.barrier()")):
        events = slow_rank.events(1, kind)
        found = {text[lines[event["w"]]["line"] - 1].strip() for event in events}
        assert found == {code}
    samples = [json.loads(line) for line in (slow_rank.folder(1) / "samples.jsonl").read_text().splitlines()]
    sampled = {line["where"]: line for line in samples if "where" in line}
    at = [sampled[user] for line in samples if "s" in line for _, user, _ in line["s"]]
    sleeping = [
        line for line in at if line["file"].endswith("plain_ddp.py") and "sleep" in text[line["line"] - 1]
    ]
    assert len(sleeping) >= 4


@pytest.mark.torchrun
def test_settings_name_the_lines_that_built_what_they_describe(slow_rank: Recorded) -> None:
    lines = {line["where"]: line for line in slow_rank.lines(1) if "where" in line}
    text = (JOBS / "plain_ddp.py").read_text().splitlines()
    for thing, code in (("ddp", "DistributedDataParallel("), ("loaders", "DataLoader(")):
        (info,) = slow_rank.info(1)[thing]
        assert code in text[lines[info["where"]]["line"] - 1]


@pytest.mark.torchrun
def test_settings(slow_rank: Recorded) -> None:
    info = slow_rank.info(1)
    assert info["schema"] == "ddpdoctor.rank/2" and info["rank"] == 1 and info["local_rank"] == 1
    assert info["world_size"] == 2 and info["backend"] == "gloo" and info["device"] == "cpu"
    assert info["process_groups"] == [{"name": "0", "backend": "gloo", "ranks": [0, 1], "size": 2}]
    (ddp,) = info["ddp"]
    assert (
        ddp["module"] == "Sequential"
        and ddp["bucket_cap_bytes"] == 25 * 1024 * 1024
        and ddp["parameter_tensors"] == 8
        and ddp["largest_parameter_bytes"] == 4 * 16 * 16
    )
    assert sum(ddp["bucket_bytes"]) == ddp["parameters_bytes"] == 4 * (3 * (16 * 16 + 16) + 17)
    (loader,) = info["loaders"]
    assert (
        loader["num_workers"] == 1 and loader["batch_size"] == 8 and loader["sampler"] == "DistributedSampler"
    )
    assert loader["dataset_length"] == 512 and loader["batches_per_epoch"] == 32
    assert [optimizer["type"] for optimizer in info["optimizers"]] == ["Adam"]
    assert 0 < info["joining_ns"] < info["started_ns"] < info["ended_ns"]
    assert info["environment"]["NCCL_DEBUG"] == "WARN" and "secret" not in json.dumps(info)
    assert info["hook"]["errors"] == []


@pytest.mark.torchrun
@pytest.mark.parametrize("rank", [0, 1])
def test_the_window_covers_its_steps(slow_rank: Recorded, rank: int) -> None:
    window = slow_rank.info(rank)["window"]
    assert window["state"] == "saved" and window["steps"] == [8, 11]
    steps = slow_rank.steps(rank)
    assert [step["step"] for step in steps if "profiled" in step.get("marks", [])] == [8, 9, 10]
    with gzip.open(slow_rank.folder(rank) / "trace.json.gz") as source:
        trace = json.load(source)
    assert trace["distributedInfo"]["rank"] == rank and trace["distributedInfo"]["pg_config"][0]["ranks"] == [
        0,
        1,
    ]
    base = trace["baseTimeNanoseconds"]
    starts = [
        base + event["ts"] * 1000
        for event in trace["traceEvents"]
        if event.get("name") == "DistributedDataParallel.forward"
    ]
    spans = [step["t"] for step in steps if step["step"] in (8, 9, 10)]
    assert [any(begin <= start <= end for start in starts) for begin, end in spans] == [True] * 3
    flight = json.loads((slow_rank.folder(rank) / "flight.json").read_text())
    assert any(entry["profiling_name"] == "gloo:all_reduce" for entry in flight["entries"])


@pytest.mark.extended
@pytest.mark.torchrun
def test_ranks_of_spawn(tmp_path) -> None:
    recorded = run_recorded(tmp_path, [sys.executable, str(JOBS / "spawned.py")])
    assert recorded.process.stdout == "parent done\n", recorded.process.stderr
    assert recorded.folders() == ["00000", "00001"]
    assert [len(recorded.steps(rank)) for rank in (0, 1)] == [6, 6]


@pytest.mark.extended
@pytest.mark.torchrun
def test_a_rank_of_spawn_that_raises(tmp_path) -> None:
    """Its exception is caught there, to be told to the parent."""
    recorded = run_recorded(tmp_path, [sys.executable, str(JOBS / "spawned.py"), "raises"])
    assert recorded.process.returncode == 1 and "ValueError: a bad sample" in recorded.process.stderr
    assert [len(recorded.steps(rank)) for rank in (0, 1)] == [6, 6]
    ending = json.loads((recorded.folder(1) / "ending.json").read_text())
    assert (ending["how"], ending["raised"][0]["type"]) == ("exception", "ValueError")
    assert ending["raised"][0]["frames"][0][2] == "reading"


@pytest.mark.torchrun
def test_a_job_of_one_process_is_recorded(tmp_path) -> None:
    recorded = run_recorded(tmp_path, forked("single.py", ranks=0))
    assert recorded.process.stdout == "single done\n" and recorded.process.stderr == ""
    info = recorded.info(0)
    assert info["world_size"] == 1 and info["backend"] is None and info["joining_ns"] is None
    # The first optimizer step is where it shows that there is something to record.
    assert len(recorded.steps(0)) == 8


@pytest.mark.torchrun
def test_garbage_collections_leave_room_for_the_other_events_of_their_step(tmp_path) -> None:
    """Where a rank builds an index in Python, the first forward pass shows when it was done."""
    recorded = run_recorded(tmp_path, one_rank("index_building.py"))
    assert recorded.process.returncode == 0, recorded.process.stderr
    events = recorded.steps(0)[0]["ev"]
    kinds = [event["k"] for event in events]
    assert {"fwd", "bwd", "opt", "more"} <= set(kinds) and kinds.count("gc") == 128
    (more,) = (event for event in events if event["k"] == "more")
    assert more["n"] >= 150 and more["d"] >= 150 * 200_000


@pytest.mark.torchrun
def test_loaders_that_the_job_does_not_keep(tmp_path) -> None:
    recorded = run_recorded(tmp_path, forked("loaders_not_kept.py", ranks=0))
    assert recorded.process.returncode == 0, recorded.process.stderr
    loaders = recorded.info(0)["loaders"]
    assert [(each["num_workers"], each["batch_size"], each["id"]) for each in loaders][:2] == [
        (0, 8, 0),
        (1, 32, 1),
    ]
    assert all(each["dataset_length"] == 64 and each["where"] is not None for each in loaders)


@pytest.mark.torchrun
def test_a_loader_that_a_framework_rebuilt_has_the_line_of_the_original(tmp_path) -> None:
    """But for ``unclear``, whose data set has several loaders: there it is the line that called the framework."""
    job = JOBS / "prepared_loaders.py"
    recorded = run_recorded(tmp_path, forked(job, str(tmp_path), ranks=0))
    assert recorded.process.returncode == 0, recorded.process.stderr
    lines = {line["where"]: line for line in recorded.lines(0) if "where" in line}
    text = job.read_text().splitlines()
    loaders = recorded.info(0)["loaders"]
    assert [loader["batch_size"] for loader in loaders] == [2, 4, 8]
    for loader in loaders:
        assert f"# line of {loader['batch_size']}" in text[lines[loader["where"]]["line"] - 1]


@pytest.mark.torchrun
def test_what_the_job_keeps_makes_nothing_dearer(tmp_path) -> None:
    """Bytecode operations of the hook, not time: a scan of all that lives is some ten operations for each."""
    recorded = run_recorded(tmp_path, forked("kept_things.py", str(tmp_path), "900", ranks=0))
    assert recorded.process.returncode == 0, recorded.process.stderr
    few, many = map(int, recorded.process.stdout.split())
    assert few > 10_000, "what the hook does was counted"
    assert many < 1.05 * few


def told_of(*files: str) -> str | None:
    """Of which of these files, the caller after the called, a line would be told."""
    told = CodeKinds().innermost((compile("", file, "exec"), file) for file in files)
    assert told_in_a_step(*files) == [told, told], "the way without a detour"
    return told


def told_in_a_step(*files: str) -> list[str | None]:
    """The same twice, as wrappers ask: of functions in these files that call each other, in a thread without any other."""
    defined: list[str] = []
    lines = Lines(CodeKinds(), defined.append)

    def asked() -> str:
        return lines.caller()

    call = asked
    for file in (*files, "<nobody's>"):
        space = {"call": call}
        exec(compile("def calling():\n    return call()\n", file, "exec"), space)
        call = space["calling"]
    answers: list[str] = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            answers.append(pool.submit(call).result())
    assert len(defined) <= 1
    return [json.loads(defined[0])["file"] if answer else None for answer in answers]


def test_of_installed_packages_the_least_known_is_the_job() -> None:
    packages = "/env/lib/python3.11/site-packages"
    command = f"{sysconfig.get_paths()['scripts']}/tool"
    tool, accelerate, pillow = (f"{packages}/{name}/x.py" for name in ("tool", "accelerate", "PIL"))
    of_torch = f"{packages}/torch/x.py"
    assert told_of(of_torch, pillow, accelerate, tool, command) == tool
    assert told_of(accelerate, tool, "/home/me/train.py", command) == "/home/me/train.py"
    assert told_of(of_torch, accelerate, "<string>") == accelerate
    assert told_of(of_torch, command) == command
    assert told_of(of_torch) is None


def test_the_size_of_inputs_in_whatever_they_come() -> None:
    tensor = torch.zeros(2, 3)
    assert input_elements((tensor, {"mask": tensor, "more": [tensor, "text"]}, None, 3)) == 18
    assert input_elements(()) == 0


class _AnswersAll(dict):  # type: ignore[type-arg]
    __getattr__ = dict.get


class _Lazy(UserDict):  # type: ignore[type-arg]
    def __getitem__(self, key: object) -> object:
        raise AssertionError("the job's code was called")

    values = keys = __iter__ = __getitem__  # type: ignore[assignment]


class _OwnTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> object:
        raise AssertionError("the job's code was called")


class _Pair(NamedTuple):
    image: torch.Tensor
    label: int


def test_bytes_of_a_batch() -> None:
    """Of the memory behind its tensors, without calling the job's code; unknown rather than wrong."""
    row = torch.zeros(4)
    assert tensor_bytes([row, {"a": (row, 3, "text"), "b": [[row]]}, None]) == 48
    assert tensor_bytes(_AnswersAll(a=row)) == tensor_bytes(_Pair(row, 1)) == 16
    lazy = _Lazy()
    lazy.data = {"ids": row}
    assert tensor_bytes(lazy) == 16
    assert tensor_bytes(torch.zeros(1).expand(10**9)) == 4
    loop: list[object] = [row]
    loop.append(loop)
    several = [
        loop,
        [[*range(2000)], [*range(2000)]],
        torch.zeros(2, 2).to_sparse(),
        row.as_subclass(_OwnTensor),
        object(),
    ]
    for unknown in (*several, {}, 3, [row] * 3000):
        assert tensor_bytes(unknown) is None


@pytest.mark.torchrun
def test_the_profiler_is_closed_well_after_its_last_step(tmp_path) -> None:
    """Gloo's threads write to memory that closing it frees, until they are through with the collectives it saw."""
    command = forked("plain_ddp.py", "--steps", "60", "--slow-rank", "1", "--slow-ms", "40")
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(8, 11)))
    assert recorded.process.returncode == 0, recorded.process.stderr
    for rank in (0, 1):
        window = recorded.info(rank)["window"]
        steps = {step["step"]: step for step in recorded.steps(rank)}
        closing = [number for number, step in steps.items() if "profiler_close" in step.get("marks", [])]
        profiled = [number for number, step in steps.items() if "profiled" in step.get("marks", [])]
        assert (window["state"], window["steps"], profiled) == ("saved", [8, 11], [8, 9, 10])
        assert len(closing) == 1 and steps[closing[0]]["t"][0] - steps[10]["t"][1] >= 1_000_000_000
        with gzip.open(recorded.folder(rank) / "trace.json.gz") as trace:
            names = [event.get("name", "") for event in json.load(trace)["traceEvents"]]
        # The later steps, in which the profiler is still open, are not in it.
        assert sum(name.startswith("DistributedDataParallel.forward") for name in names) == 3


@pytest.mark.torchrun
def test_optimizers_and_loaders_of_each_task_are_counted_and_let_go(tmp_path) -> None:
    recorded = run_recorded(tmp_path, forked("many_optimizers.py", "--tasks", "300", ranks=0))
    assert recorded.process.returncode == 0, recorded.process.stderr
    optimizers, loaders = map(int, recorded.process.stdout.split())
    assert 1 <= optimizers <= 3 and 1 <= loaders <= 3, "the last task's, and the one that lives on"
    document = recorded.info(0)
    numbers = [event["o"] for event in recorded.events(0, "opt")]
    assert [each["id"] for each in document["optimizers"]] == list(range(min(256, max(numbers) + 1)))
    # The first task's was iterated before the first optimizer step, with which the recording begins.
    assert len(document["loaders"]) == 256 and document["not_listed"]["loaders"] == 299 - 256
    outer = max(set(numbers), key=numbers.count)
    assert numbers.count(outer) > len(numbers) / 3, "its number stays"
    fresh = [number for number in numbers if number != outer]
    assert fresh == sorted(set(fresh)), "a new one for each task"
