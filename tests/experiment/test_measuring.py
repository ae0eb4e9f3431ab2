"""Trials in turn, of jobs that are only imagined."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ddpdoctor.experiment import Budget, Command, Experiment, Plan, Proposal, measuring, running
from ddpdoctor.experiment.running import Trial
from ddpdoctor.report.experiment_view import verdict_text

WORKERS = {"loader.num_workers": 2}


def trial(level_ms: float, **known: object) -> Trial:
    changes = known.pop("changes", {name: {"state": "applied"} for name in WORKERS})
    return Trial(np.full(40, level_ms), changes, None, [], 0.0, **known)


@pytest.fixture
def imagined(monkeypatch) -> Callable[..., Experiment]:
    """An experiment whose trials are given; an exception among them is raised in its place."""

    def experiment(
        *given: Trial | BaseException,
        settings=WORKERS,
        searched=(),
        in_blocks=(),
        budget_s=60.0,
        **planned: object,
    ) -> Experiment:
        left = list(given)

        def run_trial(command, settings, steps, limit_s) -> Trial:
            asked.append((dict(settings), steps))
            following = left.pop(0)
            if isinstance(following, BaseException):
                raise following
            return following

        def run_blocks(command, blocks, steps, limit_s) -> list[Trial]:
            jobs.append([dict(block) for block in blocks])
            following = left_in_blocks.pop(0)
            if isinstance(following, BaseException):
                raise following
            if isinstance(following, list):
                return following
            return [following.get(tuple(block.values()), trial(20.0)) for block in blocks]

        left_in_blocks = list(in_blocks)
        monkeypatch.setattr(measuring, "run_trial", run_trial)
        monkeypatch.setattr(measuring, "run_blocks", run_blocks)
        proposals = [Proposal(each) for each in searched or [settings]]
        plan = Plan(Command([], {}), proposals, 40, Budget(budget_s), halving=bool(searched), **planned)
        return Experiment(plan, lambda words: None)

    asked: list[tuple[dict[str, object], int]] = []
    jobs: list[list[dict[str, object]]] = []
    experiment.jobs = jobs
    experiment.asked = asked
    return experiment


def test_an_interrupt_keeps_the_trial_whose_second_baseline_never_ran(imagined):
    experiment = imagined(trial(20.0), trial(10.0), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    (variant,) = experiment.answer([]).variants
    assert (variant.trials, variant.verdict) == (1, "same")
    assert variant.median_ms == pytest.approx(10.0)
    assert "1 of the 3 rounds" in variant.why


def test_a_budget_too_short_for_a_verdict_is_told_and_the_change_so_far_is_given(imagined):
    slow, fast = replace(trial(170.0), took_s=11.0), replace(trial(98.0), took_s=11.0)
    experiment = imagined(slow, fast, slow, fast, slow, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    answer = experiment.answer([])
    assert answer.notes[0].startswith(
        "A trial takes 11 s, so the time allows 2 rounds, and a verdict needs 3"
    )
    assert "`--budget 120`" in answer.notes[0]
    assert verdict_text(answer.variants[0]) == "-42% so far, not decided yet"
    assert answer.variants[0].why == "2 of the 3 rounds that a verdict needs (98 ms and 98 ms)"


def test_the_first_trial_warms_the_files_up_and_is_compared_with_nothing(imagined):
    cold, warm = trial(60.0), trial(20.0)
    experiment = imagined(cold, warm, warm, warm, warm, warm, warm)
    experiment.run()
    answer = experiment.answer([])
    assert (answer.baseline.median_ms, answer.baseline.trials) == (pytest.approx(20.0), 3)
    assert answer.variants[0].change == pytest.approx(0.0)
    assert answer.variants[0].verdict == "same"
    assert answer.variants[0].trials_ms == [20.0] * 3


def test_no_step_takes_less_than_nothing_however_much_the_machine_wavers(imagined):
    warm = [trial(level) for level in (26.0, 27.0, 60.0)]
    between = [trial(20.0)] * 3
    given = [each for pair in zip(between, warm, strict=True) for each in pair]
    experiment = imagined(trial(34.0), *given, rounds=3)
    experiment.run()
    low, high = experiment.answer([]).baseline.interval_ms
    assert 0 < low < 60.0 < high


def test_what_was_not_applied_has_no_time(imagined):
    refused = Trial(
        np.full(40, 10.0), {"loader.num_workers": {"state": "refused", "why": "x"}}, None, [], 0.0
    )
    experiment = imagined(trial(20.0), refused)
    experiment.run()
    (variant,) = experiment.answer([]).variants
    assert (variant.verdict, variant.median_ms, variant.change) == ("not applied", None, None)
    assert variant.trials_ms == []


def test_trials_outlast_the_queue_of_the_workers_that_are_tried(imagined):
    experiment = imagined(
        trial(20.0), KeyboardInterrupt(), settings={"loader.num_workers": 16, "loader.prefetch_factor": 4}
    )
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert [steps for _, steps in imagined.asked] == [261, 261]
    assert "261 steps instead of 40" in experiment.answer([]).notes[0]


def test_loaders_of_the_job_itself_lengthen_trials_and_its_first_one_is_made_again(imagined):
    own = trial(20.0, loaders=((8, 2),))
    experiment = imagined(own, own, KeyboardInterrupt(), settings={"loader.prefetch_factor": 4})
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert [steps for _, steps in imagined.asked] == [40, 133, 133]
    assert experiment.answer([]).baseline.trials == 1


def test_more_workers_than_any_queue_is_outlasted_by_make_no_endless_trials(imagined):
    experiment = imagined(trial(20.0), KeyboardInterrupt(), settings={"loader.num_workers": 1024})
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert [steps for _, steps in imagined.asked] == [517, 517]
    assert "Up to 2,048 batches are prepared ahead" in experiment.answer([]).notes[1]


def test_a_change_of_what_is_in_some_steps_is_told_by_means(imagined):
    stalls = np.full(40, 20.0)
    stalls[::10] = 120.0
    as_it_is, even = replace(trial(0.0), step_ms=stalls), trial(20.0)
    experiment = imagined(as_it_is, even, as_it_is, even, as_it_is, even, as_it_is)
    experiment._arms[0].proposal = replace(experiment._arms[0].proposal, in_some_steps=True)
    experiment.run()
    answer = experiment.answer([])
    (variant,) = answer.variants
    assert answer.baseline.median_ms == pytest.approx(20.0)
    assert variant.baseline_mean_ms == pytest.approx(30.0)
    assert (variant.verdict, variant.median_ms) == ("faster", pytest.approx(20.0))


SEARCHED = [{"loader.num_workers": number} for number in (1, 2, 4)]


def test_a_search_of_loaders_is_one_job_a_round_and_the_slow_are_left(imagined):
    levels = {(1,): trial(15.0), (2,): trial(9.0), (4,): trial(10.0)}
    experiment = imagined(trial(60.0), searched=SEARCHED, in_blocks=[levels] * 7)
    experiment.run()
    assert len(imagined.asked) == 1  # the job as it is, which tells what loaders there are
    assert imagined.jobs[0] == [{}, SEARCHED[0], {}, SEARCHED[1], {}, SEARCHED[2], {}]
    assert imagined.jobs[1] == [{}, SEARCHED[2], {}, SEARCHED[1], {}]
    answer = experiment.answer([])
    assert answer.baseline.median_ms == pytest.approx(20.0)
    best = answer.best()
    assert best is not None and best.settings == SEARCHED[1]
    assert answer.variants[0].why == "dropped from further rounds: others were faster"


def test_where_loaders_cannot_be_changed_within_a_job_each_trial_is_one(imagined):
    error = running.BlocksError("Stream is iterable: it would begin again")
    given = [trial(20.0, changes={"loader.num_workers": {"state": "applied"}})] * 40
    experiment = imagined(*given, searched=SEARCHED, in_blocks=[error])
    experiment.run()
    assert "Stream is iterable" in experiment.answer([]).notes[0]
    assert len(imagined.jobs) == 1
    assert len(imagined.asked) > 7


LEVELS = {(1,): trial(15.0), (2,): trial(9.0), (4,): trial(10.0)}


@pytest.mark.parametrize(("run_steps", "blocks"), [(337, [7, 5]), (336, [5, 3, 5]), (145, [3, 3, 3, 3, 3])])
def test_jobs_with_blocks_are_shorter_than_the_run(imagined, run_steps, blocks):
    """They may overwrite at their end what the run wrote there. Of 40 steps and 8 batches that may be lost with a queue."""
    experiment = imagined(
        trial(60.0), searched=SEARCHED, in_blocks=[LEVELS] * 20, run_steps=run_steps, rounds=2
    )
    experiment.run()
    assert [len(job) for job in imagined.jobs] == blocks
    assert len(imagined.asked) == 1
    assert {tuple(block.values()) for job in imagined.jobs for block in job[1::2]} == {(1,), (2,), (4,)}
    assert [variant.trials for variant in experiment.answer([]).variants] == [1, 2, 2]


def test_a_run_too_short_for_blocks_is_tried_in_separate_jobs(imagined):
    given = [trial(20.0, changes={"loader.num_workers": {"state": "applied"}})] * 40
    experiment = imagined(*given, searched=SEARCHED, run_steps=144, rounds=1)
    experiment.run()
    assert imagined.jobs == [] and len(imagined.asked) == 7
    assert experiment.answer([]).notes == [
        "Each trial is a separate job: the job's 144 steps are too few for several settings in turn."
    ]


def test_trials_that_need_many_steps_do_not_reach_the_end_of_the_run(imagined):
    many = {"loader.num_workers": 16, "loader.prefetch_factor": 4}
    experiment = imagined(trial(20.0), KeyboardInterrupt(), settings=many, run_steps=150)
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert [steps for _, steps in imagined.asked] == [149, 149]
    assert (
        "149 steps, so that none reaches the job's own end after 150; 261" in experiment.answer([]).notes[0]
    )


def test_a_budget_too_short_for_all_blocks_is_spent_on_fewer_in_a_job(imagined):
    first = replace(trial(60.0), took_s=100.0)
    experiment = imagined(first, searched=SEARCHED, in_blocks=[LEVELS] * 20, budget_s=399.0, rounds=1)
    experiment.run()
    assert [len(job) for job in imagined.jobs] == [3, 5]
    assert [variant.trials for variant in experiment.answer([]).variants] == [1, 1, 1]


def ended(why: str, after: int | None = None) -> Trial:
    return Trial(np.empty(0), {}, None, [], 0.0, why, ended_after=after)


def test_a_job_that_does_not_get_through_all_blocks_keeps_the_finished_ones(imagined):
    part = [trial(20.0), trial(15.0), trial(20.0), trial(9.0), ended("it had not ended after 96 s")]
    experiment = imagined(trial(60.0), searched=SEARCHED, in_blocks=[part, LEVELS], rounds=1)
    experiment.run()
    assert imagined.jobs[1] == [{}, SEARCHED[1], {}, SEARCHED[2], {}]
    answer = experiment.answer([])
    assert [variant.trials_ms for variant in answer.variants] == [[15.0], [9.0], [10.0]]
    (note,) = answer.notes
    assert note.endswith("did not get through all of them: it had not ended after 96 s.")


def test_the_end_of_a_job_of_unknown_length_is_reached_once(imagined):
    part = [trial(20.0), trial(15.0), trial(20.0), ended("it came to its own end after 150 steps", 150)]
    experiment = imagined(trial(60.0), searched=SEARCHED, in_blocks=[part, LEVELS, LEVELS], rounds=1)
    experiment.run()
    assert [len(job) for job in imagined.jobs] == [7, 3, 3]
    assert experiment.answer([]).notes == [
        "The job came to its own end after 150 steps: once. Later jobs do not reach it."
    ]


def test_a_job_whose_first_change_does_not_finish_is_left_for_separate_jobs(imagined):
    given = [trial(20.0, changes={"loader.num_workers": {"state": "applied"}})] * 40
    failed = [trial(20.0), ended("it ended with exit code 1")]
    experiment = imagined(*given, searched=SEARCHED, in_blocks=[failed], rounds=1)
    experiment.run()
    assert len(imagined.jobs) == 1 and len(imagined.asked) == 7
    assert experiment.answer([]).notes == ["Each trial is a separate job: it ended with exit code 1."]


@pytest.mark.filterwarnings("error")
def test_a_failed_trial_of_the_unchanged_job_drops_no_variant(imagined):
    """Without it the variant beside it has nothing to be compared with yet."""
    failed = Trial(np.empty(0), {}, None, [], 0.0, "it ended with exit code 1")
    fine, middle, slow = trial(20.0), trial(15.0), trial(19.0)
    searched = [{"ddp.bucket_cap_mb": size} for size in (1.0, 5.0, 25.0)]
    given = [
        replace(each, changes={}) for each in (trial(60.0), trial(9.0), failed, middle, fine, slow, fine)
    ]
    experiment = imagined(*given, KeyboardInterrupt(), searched=searched)
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert [arm.is_dropped for arm in experiment._arms] == [False, False, True]
    assert experiment.answer([]).variants[0].verdict == "same"


def test_what_a_copy_lacks_is_remarked(imagined):
    experiment = imagined(trial(20.0, left_out="The copy lacks a pipe."), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert experiment.answer([]).notes == ["The copy lacks a pipe."]


def test_ranks_that_disagree_have_not_applied_a_setting():
    applied, refused = {"state": "applied"}, {"state": "refused", "why": "x"}
    unseen = {"state": "not seen"}
    assert running._least_applied([applied, refused, unseen]) == refused
    assert running._least_applied([applied, unseen]) == unseen
    assert running._least_applied([{}, applied]) == applied
    assert running._least_applied([]) == {}


def test_how_a_job_ended_is_told_by_its_own_error_or_by_the_signal_of_a_rank(tmp_path):
    log = tmp_path / "output"
    log.write_text(
        "[rank1]: Traceback (most recent call last):\n"
        "[rank1]: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert "exit code 1: RuntimeError: DataLoader worker" in running._failure_text(log, 1)
    log.write_text(
        "[rank0]: RuntimeError: Caught OSError in DataLoader worker process 0.\n"
        "[rank0]: Original Traceback (most recent call last):\n"
        "[rank0]: OSError: handle of another process\n"
    )
    assert running._failure_text(log, 1) == "it ended with exit code 1: OSError: handle of another process"
    log.write_text("  exitcode  : -9 (pid: 4)\n  traceback : Signal 9 (SIGKILL) received by PID 4\n")
    assert running._failure_text(log, 1).startswith("a rank was ended by SIGKILL, as the kernel does")
    log.write_text("")
    assert running._failure_text(log, -15) == "it ended with signal 15"


def test_a_folder_that_takes_nothing_is_an_answer(monkeypatch):
    def full(*given: object, **more: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    found = running.run_trial(Command(["true"], {}), {}, 20, 5.0)
    assert found.why == "it cannot be recorded: No space left on device (TMPDIR names another place)"


def test_a_job_that_ends_by_itself_is_remarked(imagined):
    experiment = imagined(trial(20.0, ended_after=30), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert "after 30 of 40 steps, as each trial did" in experiment.answer([]).notes[0]


@pytest.mark.parametrize(("own_end", "others"), [(30, 29), (12, 40)])
def test_a_job_s_own_end_is_reached_once_unless_that_leaves_too_few_steps(imagined, own_end, others):
    experiment = imagined(trial(20.0, ended_after=own_end), KeyboardInterrupt(), to_the_end=False)
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert [steps for _, steps in imagined.asked] == [40, others]
    assert experiment.answer([]).steps_each == others


def test_what_workers_prepared_ahead_is_left_out(monkeypatch):
    times = [(0, 0), *((step, step * 10_000_000) for step in range(1, 101))]
    monkeypatch.setattr(running, "_ends", lambda rank: iter(times))
    assert len(running.step_times([None])) == 75
    assert len(running.step_times([None], 64)) == 36
