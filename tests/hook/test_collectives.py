"""The peer of a collective, and whether it is asynchronous, however the job gives its arguments."""

from __future__ import annotations

import pytest

from .recording import HookOptions, Recorded, forked, run_recorded

pytestmark = [pytest.mark.torchrun]

JOB = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2)).sum().backward()
    optimizer.step()

one, two = torch.ones(1), [torch.ones(1), torch.ones(1)]
group = dist.new_group([1])

step()
dist.scatter(one, two if rank == 1 else None, 1)
dist.gather(one, two if rank == 1 else None, 1)
dist.scatter_object_list([None], ["a", "b"] if rank == 1 else None, 1)
dist.gather_object("a", [None, None] if rank == 1 else None, 1)
dist.broadcast(one, 1)
dist.broadcast(one, src=1)
dist.reduce(one, 1)
if rank == 1 and "group_src" in dist.broadcast.__wrapped__.__code__.co_varnames:
    dist.broadcast(one, group=group, group_src=0)
elif rank == 1:
    dist.broadcast(one, 1, group)
step()
works = [dist.all_reduce(one, dist.ReduceOp.SUM, None, True), dist.all_reduce(one, async_op=True)]
works.append(dist.barrier(None, True))
works.append(dist.broadcast(one, 0, None, True))
dist.all_reduce(one, dist.ReduceOp.SUM, None, False)
for work in works:
    work.wait()
step()
for _ in range(150):
    step()
    for source in (0, 1):
        dist.broadcast(one, source)
os._exit(0)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    tmp = tmp_path_factory.mktemp("collectives")
    (tmp / "job.py").write_text(JOB)
    found = run_recorded(tmp, forked(tmp / "job.py"), HookOptions(profile_steps=None))
    assert found.process.returncode == 0, found.process.stderr
    return found


def events(recorded: Recorded, step: int) -> list[dict]:
    (found,) = (line for line in recorded.steps(1) if line["step"] == step)
    return [event for event in found["ev"] if event["k"] in ("coll", "bar", "wait")]


def test_the_root_is_the_one_that_the_job_names(recorded) -> None:
    found = [(event["op"], event.get("src"), event.get("dst")) for event in events(recorded, 1)]
    assert found == [
        ("scatter", 1, None),
        ("gather", None, 1),
        ("scatter_object_list", 1, None),
        ("gather_object", None, 1),
        ("broadcast", 1, None),
        ("broadcast", 1, None),
        ("reduce", None, 1),
        ("broadcast", 1, None),
    ]


def test_a_call_without_a_keyword_may_be_asynchronous(recorded) -> None:
    """And each wait for one is written, in the order of the waits."""
    found = [(event["k"], event.get("op"), event.get("async", False)) for event in events(recorded, 2)]
    assert found == [
        ("coll", "all_reduce", True),
        ("coll", "all_reduce", True),
        ("bar", "barrier", True),
        ("coll", "broadcast", True),
        ("coll", "all_reduce", False),
        *[("wait", None, False)] * 4,
    ]


def test_calls_of_one_line_with_other_roots_are_told_apart_in_brief_steps(recorded) -> None:
    assert sum(bool(step.get("thin")) for step in recorded.steps(0)) > 50
    text = (recorded.folder(0) / "calls.jsonl").read_text()
    assert '"src":0' in text and '"src":1' in text
