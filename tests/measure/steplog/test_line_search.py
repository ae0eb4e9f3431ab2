"""Optimizers that evaluate the loss several times per step need the gradients of all ranks each time."""

import pytest

from ddpdoctor.measure.graph import graph_of_logs
from ddpdoctor.measure.steplog import Event, RankLog, Step
from ddpdoctor.rundir.reader import RankRecord

MS = 10**6


def job(optimizer):
    """20 steps in which the optimizer's closure runs four forward and backward passes."""
    ddp = [{"id": 0, "parameters_bytes": 4096, "module": "Net"}]
    logs = []
    for rank in range(2):
        info = {"host": "a", "rank": rank, "ddp": ddp, "optimizers": [{"id": 0, "type": optimizer}]}
        steps = []
        for number in range(20):
            events = [Event("opt", MS, 48 * MS)]
            for n in range(4):
                at = (2 + 12 * n) * MS
                events.append(Event("fwd", at, 4 * MS, module=0))
                reduced = {"module": 0, "synced": True, "ready_ns": (3 * MS,), "forward_end_ns": at + 4 * MS}
                events.append(Event("bwd", at + 4 * MS, 6 * MS, **reduced))
            steps.append(
                Step(number, 50 * MS * number, 50 * MS * (number + 1), tuple(events), (), None, None)
            )
        logs.append(RankLog(rank, RankRecord("", rank, info), tuple(steps)))
    return logs


@pytest.mark.parametrize(("optimizer", "redundant"), [("SGD", 3), ("LBFGS", 0)])
def test_only_passes_that_are_accumulated_are_reduced_again(optimizer, redundant):
    (group,) = graph_of_logs(job(optimizer)).groups
    assert len(group.syncs) == 4 and group.reduced_again.sum() == redundant
