"""What-if analysis of pipeline- and data-parallel jobs: the published results, and generated jobs that are run
again with the cause really taken out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.pipeline import measure_stragglers, pipeline_dag, replay
from ddpdoctor.measure.pipeline.graph import PEER_TO_PEER
from ddpdoctor.measure.pipeline.stragglers import _WhatIf
from ddpdoctor.trace.operations import Operations, find_operations, read_operations

PUBLISHED = Path(__file__).resolve().parents[3].parent / "shared" / "traces" / "straggler-analysis"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published trace is not here")


@pytest.fixture(scope="module")
def published():
    (file,) = find_operations(str(PUBLISHED))
    results = {
        name: json.loads((PUBLISHED / f"{name}-AR.json").read_text()) for name in ("result", "mw", "ms")
    }
    ops = read_operations(file)
    return ops, measure_stragglers(ops), results


def job_of(ops):
    return _WhatIf(ops, pipeline_dag(ops))


def left_ms(ops, removed):
    """The mean step without what was removed."""
    return job_of(ops).as_measured.mean() * 1e3 - np.mean(removed.gain_ms)


@needs_published
@pytest.mark.extended
def test_the_published_slowdown_and_its_shares(published):
    ops, found, results = published
    assert found.slowdown == pytest.approx(results["result"]["blocking_slowdown"], abs=1e-6)
    assert found.slowdown == pytest.approx(1.9730450967, abs=1e-6)
    assert found.without_slowest.share == pytest.approx(results["mw"]["Mw"], abs=1e-6)
    assert found.without_slowest.share == pytest.approx(1.0017012777, abs=1e-6)
    assert found.without_last_stage.share == pytest.approx(results["ms"]["Ms"], abs=1e-6)
    assert found.without_last_stage.share == pytest.approx(-0.0012119640, abs=1e-6)
    launched = np.mean(found.measured_steps_ms) / 1e3 / job_of(ops).as_measured.mean()
    assert launched == pytest.approx(results["result"]["launch_slowdown"], abs=1e-6)


@needs_published
@pytest.mark.extended
def test_the_published_step_times(published):
    ops, found, results = published
    job = job_of(ops)
    for name, ours in (("tori", job.as_measured), ("tideal", job.all_ideal)):
        assert ours.mean() == pytest.approx(results["mw"][name], rel=1e-6)
    assert left_ms(ops, found.without_slowest) / 1e3 == pytest.approx(results["mw"]["trem"], rel=1e-6)
    assert left_ms(ops, found.without_last_stage) / 1e3 == pytest.approx(results["ms"]["trem"], rel=1e-6)
    base = results["result"]["step_t_base"]
    assert found.steps == [int(step) for step in base]
    assert found.measured_steps_ms == pytest.approx([s * 1e3 for s in base.values()], rel=1e-6)


@needs_published
@pytest.mark.extended
def test_the_published_attribution(published):
    """By replica, stage and kind of operation; both ends of the messages between stages are one kind."""
    ops, _, results = published
    families = {}
    for name in ops.kinds:
        if ops.of_kind(name).any():
            family = f"{name.partition('-')[0]}-pp-comm" if name in PEER_TO_PEER else name
            families.setdefault(family, []).append(name)
    chosen = {
        "dp_rank": {str(replica): ops.replica == replica for replica in np.unique(ops.replica)},
        "stage": {str(stage): ops.stage == stage for stage in np.unique(ops.stage)},
        "optype": {family: ops.of_kind(*names) for family, names in families.items()},
    }
    job = job_of(ops)
    for kind, each in chosen.items():
        ours = {name: job.slowdown_by(rows) for name, rows in each.items()}
        assert ours == pytest.approx(results["result"][f"blocking_decompose_by_{kind}"], abs=1e-6)


@needs_published
@pytest.mark.extended
def test_the_worker_that_was_slowed_down_is_named(published):
    ops, found, _ = published
    assert (found.world_size, found.replicas, found.stages) == (64, 4, 4)
    assert found.slow_workers == [0]
    worst = found.workers[0]
    assert (worst.rank, worst.replica, worst.stage) == (0, 0, 0)
    assert worst.compute_ms > 2 * max(worker.compute_ms for worker in found.workers[1:])
    speedup = job_of(ops).as_measured.mean() * 1e3 / left_ms(ops, found.without_slow_workers)
    assert speedup == pytest.approx(1.976, abs=0.001)


@needs_published
@pytest.mark.extended
def test_with_nothing_changed_the_replay_is_the_measured_run(published):
    ops, found, _ = published
    dag = pipeline_dag(ops)
    job = _WhatIf(ops, dag)
    start, end = replay(dag, job.origin, job.costs)
    # Differences between clocks, up to some microseconds, are the only ones.
    np.testing.assert_allclose(start, ops.start_s, atol=1e-4)
    np.testing.assert_allclose(end, ops.end_s, atol=1e-4)
    np.testing.assert_allclose(job.lengths_s(end) * 1e3, found.measured_steps_ms, rtol=1e-6)


# A pipeline job on paper: workers run their passes one after the other, messages and reductions hold them up.

MESSAGE_S, REDUCTION_S, OPTIMIZER_S = 0.001, 0.02, 0.005


def schedule(stage, stages, chunks, micro_batches):
    """One-forward-one-backward order with one chunk; all forward, then all backward with more."""
    if chunks > 1:
        forward = [("forward", m, c) for c in range(chunks) for m in range(micro_batches)]
        return forward + [("backward", m, c) for c in reversed(range(chunks)) for m in range(micro_batches)]
    warm_up = min(stages - stage - 1, micro_batches)
    order = [("forward", m, 0) for m in range(warm_up)]
    for m in range(micro_batches):
        order += [("forward", m + warm_up, 0)] if m + warm_up < micro_batches else []
        order += [("backward", m, 0)]
    return order


class Job:
    """Runs steps; ``cost(step, replica, stage, direction)`` is the time of one pass, s."""

    def __init__(self, cost, *, replicas=2, stages=2, chunks=1, micro_batches=4, steps=3, overlapped=False):
        self.cost, self.shape = cost, (replicas, stages, chunks, micro_batches)
        self.overlapped = overlapped
        self.rows = []
        self.lengths_s = [self._step(10 + step) for step in range(steps)]

    def _step(self, step):
        replicas, stages, _, _ = self.shape
        self.now = 100.0 * step
        begin = {
            s: self._reduce("params-all-gather", step, s, [self.now] * replicas, 0) for s in range(stages)
        }
        ready = [self._pipeline(step, replica, begin) for replica in range(replicas)]
        last = []
        for s in range(stages):
            at = [self._alone("gc", step, r, s, ready[r][s], 0.0) for r in range(replicas)]
            name = "separate-grads-all-reduce" if self.overlapped else "grads-reduce-scatter"
            if self.overlapped:
                over = self._reduce("grads-reduce-scatter", step, s, at, 0)
                at = [over] * replicas
            at = [
                self._alone("layernorm-grads-all-reduce", step, r, s, at[r], 0.001) for r in range(replicas)
            ]
            last.append(self._reduce(name, step, s, at, -1 if self.overlapped else 0))
        clipped = max(last) + REDUCTION_S
        for r, s in itertools.product(range(replicas), range(stages)):
            self._row("optimizer-clip-main-grad", step, r, s, last[s], clipped)
            self._alone("optimizer", step, r, s, clipped, OPTIMIZER_S)
        return clipped + OPTIMIZER_S - self.now

    def _pipeline(self, step, replica, begin):
        """End of each stage's last pass."""
        _, stages, chunks, micro_batches = self.shape
        todo = {s: schedule(s, stages, chunks, micro_batches) for s in range(stages)}
        free = dict(begin)
        posted = {
            (s, way): begin[s] if way == "forward" else None
            for s in range(stages)
            for way in ("forward", "backward")
        }
        sent, last = {}, stages * chunks - 1
        order = {s: list(todo[s]) for s in todo}
        ends = {s: [] for s in todo}
        while any(todo.values()):
            for s in todo:
                while todo[s]:
                    way, m, c = todo[s][0]
                    chunk = c * stages + s
                    source = chunk - 1 if way == "forward" else chunk + 1
                    if 0 <= source <= last:
                        if (way, m, source) not in sent:
                            break
                        if posted[s, way] is None:
                            posted[s, way] = self._first_post(order[s], ends[s])
                        at, sender = sent[way, m, source]
                        over = max(at, posted[s, way]) + MESSAGE_S
                        self._row(f"{way}-recv", step, replica, s, posted[s, way], over)
                        self._row(f"{way}-send", step, replica, sender, at, over)
                        free[s] = max(free[s], over)
                    todo[s].pop(0)
                    start, end = free[s], free[s] + self.cost(step, replica, s, way)
                    self._row(f"{way}-compute", step, replica, s, start, end, c, m, chunk)
                    free[s] = posted[s, way] = end
                    ends[s].append(end)
                    sent[way, m, chunk] = (end, s)
        return free

    @staticmethod
    def _first_post(order, ends):
        """The first receive of the backward pass is posted with the last forward pass of the warm-up."""
        first = next(i for i, (way, _, _) in enumerate(order) if way == "backward")
        return ends[first - 2] if first >= 2 else ends[0] - 1e-9

    def _reduce(self, kind, step, stage, arrivals, chunk):
        end = max(arrivals) + REDUCTION_S
        for replica, at in enumerate(arrivals):
            self._row(kind, step, replica, stage, at, end, chunk)
        return end

    def _alone(self, kind, step, replica, stage, start, duration):
        self._row(kind, step, replica, stage, start, start + duration)
        return start + duration

    def _row(self, kind, step, replica, stage, start, end, chunk=-1, micro_batch=-1, model_chunk=-1):
        rank = replica * self.shape[1] + stage
        self.rows.append(
            (step, replica, stage, rank, kind, start, end - start, chunk, micro_batch, model_chunk)
        )

    def operations(self, drop=lambda row: False):
        rows = sorted(row for row in self.rows if not drop(row))
        rows.sort(key=lambda row: (row[0], row[1], row[2], row[5]))
        kinds = tuple(sorted({row[4] for row in rows}))
        counts, sequence = {}, []
        for row in rows:
            own = (row[0], row[3], row[4])
            sequence.append(counts.get(own, 0))
            counts[own] = sequence[-1] + 1
        numbers = [np.array([row[i] for row in rows], np.int64) for i in (0, 1, 2, 3, 7, 8, 9)]
        return Operations(
            source="made",
            kinds=kinds,
            kind=np.array([kinds.index(row[4]) for row in rows]),
            step=numbers[0],
            replica=numbers[1],
            stage=numbers[2],
            rank=numbers[3],
            sequence=np.array(sequence),
            chunk=numbers[4],
            micro_batch=numbers[5],
            model_chunk=numbers[6],
            start_s=np.array([row[5] for row in rows]),
            duration_s=np.array([row[6] for row in rows]),
        )


def passes(forward=0.1, slow=None, times=3.0):
    """Cost of passes; ``slow(step, replica, stage)`` tells where they take ``times`` as long."""

    def cost(step, replica, stage, way):
        usual = forward if way == "forward" else 2 * forward
        return usual * (times if slow is not None and slow(step, replica, stage) else 1.0)

    return cost


SHAPES = {
    "2 stages": {},
    "4 stages": {"stages": 4, "micro_batches": 8, "replicas": 3},
    "more stages than micro-batches": {"stages": 5, "micro_batches": 2},
    "interleaved": {"stages": 2, "chunks": 3, "micro_batches": 4},
    "overlapped reductions": {"stages": 3, "overlapped": True},
    "data parallel only": {"stages": 1, "replicas": 4},
    "pipeline only": {"stages": 3, "replicas": 1},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nobody_is_named_where_all_are_alike(shape):
    job = Job(passes(), **shape)
    found = measure_stragglers(job.operations())
    assert found.slowdown == pytest.approx(1.0, abs=1e-9)
    assert job_of(job.operations()).as_measured.mean() == pytest.approx(np.mean(job.lengths_s))
    assert (found.slow_workers, found.without_slow_workers, found.without_slowest.share) == ([], None, None)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_slow_worker_is_named_and_the_gain_is_that_of_a_run_without_it(shape):
    replicas, stages = shape.get("replicas", 2), shape.get("stages", 2)
    slow = (replicas - 1, stages // 2)
    job = Job(passes(slow=lambda step, *place: place == slow), **shape)
    ops = job.operations()
    found = measure_stragglers(ops)
    assert found.slow_workers == [slow[0] * stages + slow[1]]
    as_measured = job_of(ops).as_measured.mean()
    assert np.mean(found.measured_steps_ms) / 1e3 == pytest.approx(as_measured, rel=1e-6)
    assert as_measured == pytest.approx(np.mean(job.lengths_s))
    # Typical passes are the mean, slow ones included.
    mean = 1 + 2 / (replicas * stages)
    ideal = Job(passes(0.1 * mean), **shape)
    assert job_of(ops).all_ideal.mean() == pytest.approx(np.mean(ideal.lengths_s), rel=1e-6)
    without = Job(lambda st, r, s, way: passes(0.1 * (mean if (r, s) == slow else 1))(st, r, s, way), **shape)
    left = left_ms(ops, found.without_slow_workers) / 1e3
    assert left == pytest.approx(np.mean(without.lengths_s), rel=1e-6)


def test_an_uneven_last_stage_is_told_from_a_slow_worker():
    job = Job(
        passes(slow=lambda step, replica, stage: stage == 3, times=1.8), stages=4, micro_batches=8, replicas=3
    )
    found = measure_stragglers(job.operations())
    assert found.slow_workers == [3, 7, 11]
    assert found.without_last_stage.share > 0.9
    assert found.without_slowest.share < 0.1


def test_two_slow_workers_are_named_and_not_those_where_their_rows_and_columns_cross():
    places = {(0, 1), (2, 3)}
    job = Job(passes(slow=lambda step, *place: place in places), stages=4, micro_batches=8, replicas=3)
    found = measure_stragglers(job.operations())
    assert found.slow_workers == [1, 11]
    assert found.without_slowest.share < 0.2
    assert found.without_slow_workers.share > 0.9


def test_steps_with_missing_operations_are_set_aside():
    job = Job(passes(slow=lambda step, *place: place == (1, 0)), steps=5)
    gone = iter([True])

    def lost(row):
        step, _, stage, _, kind, *_ = row
        if step == 10 and stage == 1:
            return True
        if step == 11 and kind == "forward-send":
            return next(gone, False)
        return step == 12 and kind == "optimizer" and stage == 0

    found = measure_stragglers(job.operations(lost))
    assert found.steps == [13, 14]
    assert found.excluded_steps == 3
    assert found.slow_workers == [2]
    assert "3 step(s) in which operations are missing were excluded" in found.notes[-1]
    with pytest.raises(UnusableInput, match="no step is whole"):
        measure_stragglers(job.operations(lambda row: row[4] == "forward-send"))


def test_unknown_kinds_and_tensor_parallel_twins_are_left_out_and_told():
    job = Job(passes(slow=lambda step, *place: place == (1, 0)))
    plain = measure_stragglers(job.operations())
    twins = [(*row[:3], row[3] + 100, *row[4:]) for row in job.rows]
    job.rows += [*twins, (10, 0, 0, 0, "coffee", 1000.0, 5.0, -1, -1, -1)]
    found = measure_stragglers(job.operations())
    assert (found.slowdown, found.slow_workers) == (plain.slowdown, plain.slow_workers)
    assert "4 rank(s) share a replica and stage" in found.notes[0]
    assert "1 operation(s) of unknown kind were skipped: coffee" in found.notes[1]
