"""Which steps are recorded in full, by what that costs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from ddpdoctor.hook.job import CodeKinds, Role
from ddpdoctor.hook.recording import Recorder, active
from ddpdoctor.hook.recording.recorder import (
    BLOCK_STEPS,
    EARLY_STEPS,
    LONG_STEPS,
    MANY_STEPS,
    MOST_EVENTS,
    MOST_SHARE,
    MOST_THINNED,
    Thinning,
)
from ddpdoctor.measure.steplog import Step, read_rank_log
from ddpdoctor.rundir import STEPS_FILE
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.reader import RankRecord
from ddpdoctor.rundir.spool import Spool, make_spool_root
from ddpdoctor.rundir.stepevents import EventKind
from tests.launch.launched import make_run

from .recording import HookOptions, forked, plain_environment, run_recorded


def blocks(thinning: Thinning, first: int, last: int, cost_us: float, step_ms: float) -> list[int]:
    """First steps of the blocks that are recorded in full, where recording a step costs ``cost_us``."""
    chosen = []
    full = first // BLOCK_STEPS % thinning.every == 0
    for step in range(first + BLOCK_STEPS, last, BLOCK_STEPS):
        full = thinning.next_block(step, int(cost_us * 1e3) if full else None, int(step_ms * 1e6))
        if full:
            chosen.append(step)
    return chosen


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """Of rank 0 of the run ``tmp_path / "run"``."""
    run = str(make_run(tmp_path / "run"))
    found = Recorder(Spool(make_spool_root(run), 0, run), CodeKinds())
    yield found
    active.stop()
    found.close()
    shutil.rmtree(make_spool_root(run))


@pytest.mark.parametrize(
    ("cost_us", "early", "later", "after_many", "at_last"),
    [
        (5.0, 1, 1, 1, 2),
        (15.0, 1, 1, 1, 4),
        (30.0, 1, 1, 2, 8),
        (50.0, 1, 1, 4, 16),
        (100.0, 1, 2, 8, 32),
        (200.0, 2, 4, 16, 64),
        (1000.0, 8, 16, 64, 64),
    ],
)
def test_a_block_in_so_many_is_recorded_in_full(cost_us, early, later, after_many, at_last):
    thinning = Thinning()
    blocks(thinning, 0, EARLY_STEPS, cost_us, 20.0)
    assert thinning.every == early
    blocks(thinning, EARLY_STEPS, MANY_STEPS, cost_us, 20.0)
    assert thinning.every == later
    blocks(thinning, MANY_STEPS, LONG_STEPS, cost_us, 20.0)
    assert thinning.every == after_many
    chosen = blocks(thinning, LONG_STEPS, 4 * LONG_STEPS, cost_us, 20.0)
    assert thinning.every == at_last
    assert {b - a for a, b in zip(chosen[-9:], chosen[-8:], strict=False)} == {at_last * BLOCK_STEPS}
    assert cost_us / 20e3 / at_last <= MOST_SHARE / 32 or at_last == MOST_THINNED


def test_longer_steps_are_recorded_in_full_again():
    thinning = Thinning()
    blocks(thinning, 0, 2048, 400.0, 5.0)
    assert thinning.every > 8
    blocks(thinning, 2048, 8192, 400.0, 800.0)
    assert thinning.every == 1


def test_another_training_is_recorded_as_at_the_beginning_of_the_job():
    thinning = Thinning()
    blocks(thinning, 0, 4096, 200.0, 20.0)
    assert thinning.every > 8
    thinning.restart(4099)
    assert len(blocks(thinning, 4104, 4104 + EARLY_STEPS, 50.0, 20.0)) == EARLY_STEPS // BLOCK_STEPS - 1
    blocks(thinning, 4104 + EARLY_STEPS, 4104 + 2 * LONG_STEPS, 200.0, 20.0)
    assert thinning.every == 64


def test_the_steps_after_a_destroyed_process_group_are_recorded_in_full(recorder):
    begin = recorder.start_perf_ns
    recorder._full_block = False
    active.record(full=False)
    recorder.end_step(recorder.cut(begin + 5_000_000))
    assert not active.full
    recorder.record_new_training()
    recorder.end_step(recorder.cut(begin + 9_000_000))
    assert active.full and recorder.full_since > begin


def test_a_job_of_many_trainings_pays_no_more_than_another_one(recorder):
    described = []
    recorder.describe = lambda: described.append(recorder.step)
    for training in range(12):
        recorder.thinning.every = 64
        recorder.record_new_training()
        assert recorder.thinning.every == (1 if training < 8 else 64)
        for _ in range(20):
            recorder.end_step(recorder.cut(recorder.start_perf_ns + 1_000_000))
    assert len(described) == 12


def test_ranks_that_thin_differently_share_steps():
    cheap, dear = Thinning(), Thinning()
    both = [set(blocks(each, 0, 4096, us, 20.0)[-200:]) for each, us in ((cheap, 150.0), (dear, 600.0))]
    last = {step for step in both[1] if step > 3000}
    assert cheap.every < dear.every and last and last <= both[0]


def test_one_long_reading_of_the_clock_changes_little():
    thinning = Thinning()
    blocks(thinning, 0, 256, 50.0, 20.0)
    thinning.next_block(256, 50_000_000, 20_000_000)
    assert thinning.every == 1 and thinning.cost_us < 60


def test_steps_of_which_only_the_times_are_kept_lie_end_to_end(recorder, tmp_path):
    begin = recorder.start_perf_ns
    active.record(full=False)
    recorder.end_step(recorder.cut(begin + 5_000_000))
    recorder.brief_until = 8
    assert recorder.end_brief_step(begin + 9_000_000)
    recorder.write_brief_steps()
    drain(recorder.spool.directory)
    first, second = read_steps(tmp_path)
    assert (first.length_ns, second.length_ns) == (5_000_000, 4_000_000) and second.start_ns == first.end_ns


def test_a_checkpoint_is_recorded_in_a_step_of_which_else_only_the_times_are_kept(recorder, tmp_path):
    begin = recorder.start_perf_ns
    before, after = import_module("ddpdoctor.hook.patches.others").checkpoint_event(EventKind.SAVE)
    active.recorder = recorder
    active.record(full=False)
    after(before((), {}), None)
    assert not recorder.end_brief_step(begin + 4_000_000), "it is no brief step"
    recorder.end_step(recorder.cut(begin + 5_000_000))
    recorder.brief_until = 8
    assert recorder.end_brief_step(begin + 9_000_000)
    recorder.write_brief_steps()
    drain(recorder.spool.directory)
    saved, brief = read_steps(tmp_path)
    assert [event.kind for event in saved.events] == [EventKind.SAVE] and not brief.events
    assert not saved.in_full and saved.length_ns == 5_000_000


@pytest.mark.parametrize("kind", [EventKind.SAVE, EventKind.LOAD])
def test_a_checkpoint_that_raises_is_none(recorder, tmp_path, kind):
    """Neither the step's event nor the note of the last saved step, from which restarts are counted."""
    checkpoints = import_module("ddpdoctor.hook.patches.others")

    def full(path):
        if path == "full":
            raise OSError(28, "No space left on device")

    timed = checkpoints.around(full, checkpoints._CHECKPOINTS, *checkpoints.checkpoint_event(kind))
    active.recorder = recorder
    active.record(full=True)
    with pytest.raises(OSError, match="No space left"):
        timed("full")
    recorder.end_step(recorder.cut(recorder.start_perf_ns + 5_000_000))
    timed("elsewhere")
    recorder.end_step(recorder.cut(recorder.start_perf_ns + 5_000_000))
    drain(recorder.spool.directory)
    log = read_rank_log(RankRecord(str(tmp_path / "run" / "ranks" / "00000"), 0, {}))
    assert [[event.kind for event in step.events] for step in log.steps] == [[], [kind]]
    assert log.saved == (1 if kind is EventKind.SAVE else None)


def test_checkpoints_beyond_the_most_events_are_counted_in_their_own_step(recorder, tmp_path):
    stepping = import_module("ddpdoctor.hook.recording.steps").Stepping(recorder)
    role, begin = Role(), recorder.start_perf_ns
    stepping.listening = False
    stepping.boundary.only_role = role
    for step, saves in enumerate([2, MOST_EVENTS + 40, 0, MOST_EVENTS + 7, 0]):
        active.record(full=step == 4)
        for _ in range(saves):
            recorder.add(recorder.start_perf_ns, 10, EventKind.SAVE.opening)
        end = stepping.after_brief if step in (2, 3) else partial(stepping.after_optimizer, role)
        end(begin + 1_000_000 * (step + 1))
    drain(recorder.spool.directory)
    steps = read_steps(tmp_path)
    kinds = [[event.kind for event in step.events] for step in steps]
    assert [each.count(EventKind.SAVE) for each in kinds] == [2, MOST_EVENTS, 0, MOST_EVENTS, 0]
    assert [each.count(EventKind.MORE) for each in kinds] == [0, 1, 0, 1, 0]
    assert not any(step.in_full for step in steps)


def read_steps(tmp_path: Path) -> list[Step]:
    """What the recorder's rank has on disk."""
    return list(read_rank_log(RankRecord(str(tmp_path / "run" / "ranks" / "00000"), 0, {})).steps)


@pytest.mark.alone
@pytest.mark.parametrize("change", ["", "1"])
def test_a_thinned_job_is_counted_right(tmp_path, change):
    base = plain_environment(CHANGE=change)
    recorded = run_recorded(tmp_path, forked("thinned.py", ranks=0), HookOptions(profile_steps=None), base)
    assert recorded.process.returncode == 0, recorded.process.stderr
    before, after = map(int, recorded.process.stdout.split())
    steps = recorded.steps(0)
    # Where optimizers begin to step inside a backward that is not looked at, the round of that backward is lost, and
    # what a round is must be learnt anew.
    assert before + max(0, after - 3) <= len(steps) <= before + after
    assert [step["step"] for step in steps] == list(range(len(steps)))
    full = [step for step in steps[200:before] if "ev" in step]
    assert 8 <= len(full) < (before - 200) / 2
    for step in full:
        assert sorted(event["k"] for event in step["ev"] if event["k"] != "gc") == ["bwd", "fwd", "opt"]
        assert all(event["s"] >= 0 for event in step["ev"])
        (backward,) = [event for event in step["ev"] if event["k"] == "bwd"]
        assert backward["sync"] is True and backward["base"] >= 0


@pytest.mark.extended
def test_calls_of_a_group_are_not_told_as_those_of_a_group_destroyed_before(tmp_path):
    recorded = run_recorded(
        tmp_path, forked("groups_anew.py", ranks=0), HookOptions(profile_steps=None), plain_environment()
    )
    lines = (recorded.run / "ranks/00000/calls.jsonl").read_text().replace("\0", "").splitlines()
    calls = sorted((json.loads(line) for line in lines), key=lambda call: call["call"])
    assert [call["pg"] for call in calls][-10:] == recorded.process.stdout.split()


@pytest.mark.parametrize("logged", [0, 3, 19])
def test_a_killed_rank_leaves_the_times_of_all_its_steps(tmp_path, logged):
    """Those too that were to be written to the log together with later ones."""
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    child = os.fork()
    if not child:
        recorder = Recorder(Spool(root, 0, str(run)), CodeKinds())
        begin = recorder.start_perf_ns
        recorder._full_block = False
        active.record(full=False)
        recorder.brief_until = 64
        for step in range(20):
            if step in (0, logged):  # the first one is written with what precedes all steps
                recorder.end_step(recorder.cut(begin + 1_000_000 * (step + 1)))
            else:
                recorder.end_brief_step(begin + 1_000_000 * (step + 1))
        recorder.spool._streams[STEPS_FILE].memory[-9:] = b'{"step":1'
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (spool,) = Path(root).iterdir()
    drain(str(spool), remove=True)
    steps = read_steps(tmp_path)
    assert [(step.number, step.length_ns) for step in steps] == [(each, 1_000_000) for each in range(20)]
    assert all(one.end_ns == two.start_ns for one, two in pairwise(steps))
