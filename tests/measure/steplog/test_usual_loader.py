"""The loader that gives the training batches."""

from ddpdoctor.measure.graph import graph_of_logs, loader_limit_ns
from ddpdoctor.measure.steplog import Event, RankLog, Step
from ddpdoctor.rundir.reader import RankRecord

MS = 10**6
TRAINING, EVALUATION = 0, 1


def job(ready=0):
    """40 steps of 50 ms with two batches of 32 samples each, of which ``ready`` wait in the queue; every 20th evaluates 60 batches."""
    steps = []
    for number in range(40):
        evaluates = number % 20 == 19
        events = [
            Event("data", (2 + 25 * n) * MS, 9 * MS, loader=TRAINING, count=32, batches_ready=ready)
            for n in range(2)
        ]
        if evaluates:
            events += [Event("data", (55 + n) * MS, MS, loader=EVALUATION, count=64) for n in range(60)]
        events.append(Event("fwd", 12 * MS, 5 * MS, module=0))
        start = 50 * MS * number
        steps.append(Step(number, start, start + 50 * MS, tuple(events), (), None, None))
    loaders = [{"id": id, "num_workers": 2, "prefetch_factor": 2} for id in (TRAINING, EVALUATION)]
    return RankLog(0, RankRecord("", 0, {"host": "a", "rank": 0, "loaders": loaders}), tuple(steps))


def test_an_evaluation_of_many_batches_is_not_training():
    log = job()
    assert log.usual_loader == TRAINING
    assert log.main_loader_settings["id"] == TRAINING


def test_the_batch_is_that_of_the_loader():
    (steps,) = graph_of_logs([job()]).steps
    assert (steps.samples[0], steps.batch[0]) == (64.0, 32.0)


def test_workers_limit_the_step_if_none_of_their_batches_is_ready():
    assert loader_limit_ns(job()) == 50 * MS
    assert loader_limit_ns(job(ready=4)) is None
