"""Alternates trials of the variants with trials of the unchanged job until each variant has a verdict, or the time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import ddpdoctor
from ddpdoctor.diagnose.trials import Baseline, TrialsReport, Variant

from .judging import LEAST_ROUNDS, Round, change_of, interval, level_ms, parity, ratios, verdict
from .proposals import Proposal
from .running import (
    DEFAULT_PREFETCH,
    LEAST_STEPS,
    LEAST_WARM_UP,
    MOST_QUEUED,
    BlocksError,
    Budget,
    Command,
    Trial,
    run_blocks,
    run_trial,
)
from .settings import Results, setting_of

Log = Callable[[str], None]
MOST_ROUNDS = 7
_FAILED_BASELINES = 2
_LEAST_LIMIT_S, _LIMIT_FACTOR = 180.0, 6.0
"""Time limit of a trial: at least 180 s, and 6 times the baseline's. A variant may compile or autotune first."""
_MOST_WHY = 2000
BLOCK_SETTINGS = ("loader.num_workers", "loader.prefetch_factor", "loader.persistent_workers")
"""Settings that can be changed during a job."""
_QUEUES = 4
"""Length of a trial in full queues of the loader. The first is excluded as warm-up. Even if a full queue is ready when measuring begins,
most measured steps then use batches that are prepared later."""
_LEAST_BLOCKS = 3
"""Blocks of steps in one job: the unchanged job, one change, the unchanged job."""


@dataclass(frozen=True)
class Plan:
    """The changes to measure, and limits."""

    command: Command
    proposals: Sequence[Proposal]
    steps: int
    budget: Budget
    rounds: int = MOST_ROUNDS
    to_the_end: bool = True
    """Whether all trials of a short job run to its end, including what it writes there; otherwise only the first trial does."""
    halving: bool = False
    """Whether the slower half of the variants is dropped after each round, to search for the fastest one."""
    run_steps: int | None = None
    """Steps of the run that the proposals come from; None if unknown. Trials do not reach its end."""
    step_ms: float | None = None
    """Step time of the run that the proposals come from. Their expected step times are shares of it."""


@dataclass
class _Arm:
    """A variant and its trials."""

    proposal: Proposal
    rounds: list[Round] = field(default_factory=list)
    decided: str = ""
    """The verdict; empty while more trials may change it."""
    is_dropped: bool = False
    """Whether it is excluded from further rounds because others were faster."""

    @property
    def ratios(self) -> list[float]:
        """:func:`.judging.ratios` of the rounds so far."""
        return ratios(self.rounds, self.proposal.in_some_steps)

    def update_verdict(self) -> None:
        """Set ``decided`` from the rounds so far."""
        if logs := self.ratios:  # there are none if trials failed
            self.decided = verdict(change_of(logs)[1]) or ""


class Experiment:
    """Runs the trials of a plan. :meth:`answer` may be called at any time, also after :meth:`run` was interrupted."""

    def __init__(self, plan: Plan, log: Log) -> None:
        self._plan, self._log = plan, log
        self._baseline: list[Trial] = []
        self._arms = [_Arm(proposal) for proposal in plan.proposals]
        self._notes: list[str] = []
        self._queued = 0
        """Largest number of batches that loaders prepare ahead in any variant."""
        self._in_blocks = False
        self._block_s = 0.0
        """Seconds per block in the latest job with blocks; before that, an upper bound."""
        self._job_steps = plan.run_steps
        """Steps after which the job ends by itself; None if unknown."""
        self._wanted_steps = max(
            plan.steps, self._steps_for(()), *(each.least_steps for each in plan.proposals)
        )
        self._steps = self._allowed(self._wanted_steps)

    def run(self) -> None:
        """Run the trials A B A C A ..., with the order of the variants reversed in every other round."""
        before = self._run_first()
        self._block_s = before.took_s
        self._in_blocks = self._plan.halving and all(
            set(arm.proposal.settings) <= set(BLOCK_SETTINGS) for arm in self._arms
        )
        if not self._in_blocks:
            self._note_short_budget(before)
        for number in range(self._plan.rounds):
            arms = [arm for arm in self._arms if not arm.decided and not arm.is_dropped]
            if number % 2:
                arms.reverse()
            if self._in_blocks and not self._baseline_fails():
                arms = self._round_in_blocks(arms)
            for arm in arms:
                if self._baseline_fails():
                    self._notes.append(
                        "The unchanged job does not get through a trial, so nothing can be compared with it."
                    )
                    return
                if not self._has_time():
                    self._notes.append(
                        f"The time was up after {number} whole round{'' if number == 1 else 's'}: --budget gives more."
                    )
                    return
                before = self._measure(arm, before)
            if self._plan.halving:
                self._drop_slower_half()

    def _round_in_blocks(self, arms: Sequence[_Arm]) -> list[_Arm]:
        """Measure a round of the variants in blocks of steps, in as few jobs as their steps and the time allow. Returns the variants that
        need separate trials."""
        left = list(arms)
        while left and self._in_blocks and (most := self._most_in_one_job()):
            del left[: self._measure_in_one_job(left[:most])]
        return left

    def _most_in_one_job(self) -> int:
        """Number of variants for which one job has enough steps before its own end, and the budget enough time."""
        blocks = 2 * len(self._arms) + 1
        if self._job_steps is not None:
            # A loader that gets other workers loses the batches that it has prepared, so the job ends earlier.
            blocks = min(blocks, (self._job_steps - 1) // (self._steps + self._queued))
            if blocks < _LEAST_BLOCKS:
                self._leave_blocks(
                    f"the job's {self._job_steps} steps are too few for several settings in turn"
                )
        if self._block_s > 0:
            blocks = min(blocks, int(self._plan.budget.left_s / self._block_s))
        return max(0, blocks - 1) // 2 if self._has_time() else 0

    def _measure_in_one_job(self, arms: Sequence[_Arm]) -> int:
        """Measure these variants once in one job, each in a block of steps between two of the unchanged job. Returns the number of those
        that were measured, the first ones."""
        blocks = [{}, *(block for arm in arms for block in (dict(arm.proposal.settings), {}))]
        limit_s = min(self._plan.budget.left_s, len(blocks) * self._limit_s())
        try:
            trials = run_blocks(self._plan.command, blocks, self._steps, limit_s)
        except BlocksError as error:
            self._leave_blocks(f"within one, loaders cannot be changed ({error})")
            return 0
        finished = [trial for trial in trials if not trial.why]
        self._block_s = trials[0].took_s / max(len(finished), 1)
        measured = arms[: max(0, len(finished) - 1) // 2]
        for number, arm in enumerate(measured):
            before, trial, after = finished[2 * number : 2 * number + 3]
            # The job's first block includes its warm-up, so it is not used as a baseline.
            arm.rounds.append(Round(before if number else after, trial, after))
            arm.update_verdict()
            self._log(f"{arm.proposal.words}: {_summary(trial)}, beside {_summary(after)} unchanged")
            self._baseline.append(replace(after, took_s=self._block_s))
        if len(finished) < len(blocks):
            self._note_unfinished(trials[-1], len(measured))
        return len(measured)

    def _note_unfinished(self, trial: Trial, measured: int) -> None:
        """Handle a job that ended in the block ``trial``, after ``measured`` variants."""
        if trial.ended_after is not None:
            self._job_steps = trial.ended_after
            self._note(
                f"The job came to its own end after {trial.ended_after} steps: once. Later jobs do not reach it."
            )
        elif measured:
            self._note(f"A job with several settings in turn did not get through all of them: {trial.why}.")
        elif self._has_time():  # else the time is up for separate trials, too
            self._leave_blocks(trial.why)

    def _leave_blocks(self, why: str) -> None:
        """Measure each variant in a job of its own from now on."""
        self._in_blocks = False
        self._note(f"Each trial is a separate job: {why}.")

    def _allowed(self, steps: int) -> int:
        """``steps``, or fewer, so that the job's own end is not reached, unless the plan's trials reach it."""
        end = self._job_steps
        return steps if end is None or end <= self._plan.steps else min(steps, end - 1)

    def _run_first(self) -> Trial:
        """Run the baseline's first trial. It shows the job's loaders, which determine the length of trials."""
        first = self._run_unchanged()
        self._wanted_steps = max(self._wanted_steps, self._steps_for(first.loaders))
        needed = self._allowed(self._wanted_steps)
        if not first.why and first.ended_after is None and needed > self._steps and self._has_time():
            self._steps = needed
            self._baseline.clear()  # after another number of steps the model's parameters differ
            first = self._run_unchanged()
        self._note_steps()
        if self._queued > MOST_QUEUED:
            self._note(
                f"Up to {self._queued:,} batches are prepared ahead, of which trials outlast {MOST_QUEUED}: many workers may look "
                "faster here than in the long run."
            )
        if first.left_out:
            self._note(first.left_out)
        if first.ended_after is not None:
            self._shorten_trials(first.ended_after)
        return first

    def _note_steps(self) -> None:
        """Add a note if trials have another number of steps than planned, or fewer than they need."""
        wanted, rarest = self._wanted_steps, max(each.least_steps for each in self._plan.proposals)
        why = "batches that loaders prepare ahead would flatter shorter ones"
        if rarest >= wanted:
            why = "what happens in some steps only must happen a few times"
        if self._allowed(wanted) < wanted:
            self._note(
                f"Trials took {self._steps} steps, so that none reaches the job's own end after {self._job_steps}; {wanted} would be "
                f"better: {why}."
            )
        elif self._steps > self._plan.steps:
            self._note(f"Trials took {self._steps} steps instead of {self._plan.steps}: {why}.")

    def _shorten_trials(self, own_end: int) -> None:
        """Handle a job that ended by itself after ``own_end`` steps: shorten the next trials, unless the plan says otherwise."""
        self._job_steps = own_end
        ended = f"The job came to its own end after {own_end} of {self._steps} steps"
        if not self._plan.to_the_end and own_end > LEAST_STEPS:
            self._steps = own_end - 1
            self._note(f"{ended}: once. All other trials took {self._steps}, and did not reach it.")
        else:
            self._note(
                f"{ended}, as each trial did: what it writes there was written again, and parameters were not compared."
            )

    def _note_short_budget(self, first: Trial) -> None:
        """Add a note if the budget is too short for a verdict on every change, by the duration of the ``first`` trial."""
        rounds_s = 2 * first.took_s * len(self._arms)
        needed_s = LEAST_ROUNDS * rounds_s
        if first.why or not rounds_s or self._plan.halving or self._plan.budget.left_s > needed_s:
            return
        whole = int(self._plan.budget.left_s / rounds_s)
        minutes = math.ceil((self._plan.budget.total_s - self._plan.budget.left_s + 1.2 * needed_s) / 60)
        self._note(
            f"A trial takes {first.took_s:.0f} s, so the time allows {whole} round{'' if whole == 1 else 's'}, and a verdict needs "
            f"{LEAST_ROUNDS}: `--budget {60 * minutes}` would do."
        )

    def _note(self, words: str) -> None:
        self._notes.append(words)
        self._log(words)

    def _steps_for(self, loaders: Sequence[tuple[int, int]]) -> int:
        """Necessary steps of a trial: warm-up and ``_QUEUES`` full loader queues of at most ``MOST_QUEUED`` batches; 0 without workers."""
        given = loaders or ((0, DEFAULT_PREFETCH),)
        queued = 0
        for settings in [{}, *(arm.proposal.settings for arm in self._arms)]:
            for workers, ahead in given:
                loader_workers = settings.get("loader.num_workers", workers)
                queued = max(queued, loader_workers * settings.get("loader.prefetch_factor", ahead))
        self._queued = queued
        return LEAST_WARM_UP + _QUEUES * min(queued, MOST_QUEUED) if queued else 0

    def _drop_slower_half(self) -> None:
        """Successive halving (Jamieson and Talwalkar, AISTATS 2016): drop the slower half of the variants that are undecided or faster.
        A variant without ratios, because trials beside it failed, stays."""
        running = [
            arm for arm in self._arms if arm.decided in ("", "faster") and not arm.is_dropped and arm.ratios
        ]
        by_speed = sorted(running, key=lambda arm: change_of(arm.ratios)[0])
        for arm in by_speed[max(1, (len(by_speed) + 1) // 2) :]:
            arm.is_dropped = True

    def _run_unchanged(self) -> Trial:
        trial = run_trial(self._plan.command, {}, self._steps, self._limit_s())
        self._baseline.append(trial)
        self._log(f"unchanged: {_summary(trial)}")
        return trial

    def _measure(self, arm: _Arm, before: Trial) -> Trial:
        """Run one round of a variant. Returns the baseline's trial after it, which is also the one before the next variant's."""
        trial = run_trial(self._plan.command, arm.proposal.settings, self._steps, self._limit_s())
        refused = trial.refused
        self._log(
            f"{arm.proposal.words}: {_summary(trial) if trial.why or not refused else f'not applied ({refused})'}"
        )
        if trial.why or refused:
            arm.decided = "failed" if trial.why else "not applied"
            arm.rounds.append(Round(before, trial, before))
            return before
        arm.rounds.append(Round(before, trial, before))  # in case of an interrupt before the next trial
        arm.update_verdict()
        after = self._run_unchanged()
        # The first baseline trial is not compared: it reads files from disk that later trials find in the page cache.
        arm.rounds[-1] = Round(after if before is self._baseline[0] else before, trial, after)
        arm.update_verdict()
        return after

    def _baseline_fails(self) -> bool:
        return sum(bool(trial.why) for trial in self._baseline) >= min(_FAILED_BASELINES, len(self._baseline))

    def _has_time(self) -> bool:
        return self._plan.budget.left_s > 2 * max(trial.took_s for trial in self._baseline)

    def _limit_s(self) -> float:
        known = [trial.took_s for trial in self._baseline if not trial.why]
        limit_s = max(_LEAST_LIMIT_S, _LIMIT_FACTOR * max(known)) if known else self._plan.budget.total_s
        return max(1.0, min(limit_s, self._plan.budget.left_s))

    def answer(self, command: Sequence[str]) -> TrialsReport:
        """The results so far. ``command``: the masked command line."""
        middle, ends = self._baseline_ms(rare=False)
        baseline = Baseline(
            median_ms=middle,
            interval_ms=ends,
            steps=sum(len(trial.step_ms) for trial in self._compared),
            trials=len(self._compared),
            failed=[trial.why for trial in self._baseline if trial.why],
        )
        return TrialsReport(
            tool_version=ddpdoctor.__version__,
            created_ns=time.time_ns(),
            command=list(command),
            steps_each=self._steps,
            baseline=baseline,
            variants=[self._variant(arm) for arm in self._arms],
            notes=self._notes,
        )

    @property
    def _compared(self) -> list[Trial]:
        """The baseline's trials, without the first one if there are others."""
        return self._baseline[1:] or self._baseline

    def _baseline_ms(self, rare: bool) -> tuple[float | None, list[float] | None]:
        """(Step time of the unchanged job in ms, its interval in ms); each None if unknown."""
        logs = [math.log(level_ms(trial, rare)) for trial in self._compared if len(trial.step_ms)]
        if not logs:
            return None, None
        middle, ends = interval(logs)
        return math.exp(middle), None if ends is None else [math.exp(end) for end in ends]

    def _variant(self, arm: _Arm) -> Variant:
        proposal = arm.proposal
        baseline_ms, _ = self._baseline_ms(proposal.in_some_steps)
        trials = [each.trial for each in arm.rounds]
        settings = [setting_of(name) for name in proposal.settings]
        results = max((setting.results for setting in settings), key=list(Results).index)
        logs = [] if arm.decided == "not applied" else arm.ratios
        change, ends = change_of(logs) if logs else (None, None)
        share, bounds = proposal.expected_share, proposal.expected_share_range
        known = baseline_ms if baseline_ms is not None else self._plan.step_ms
        return Variant(
            settings=dict(proposal.settings),
            finding=proposal.finding,
            bound=any(setting.is_bound for setting in settings),
            expected_ms=None if share is None or known is None else known * share,
            expected_range_ms=None if bounds is None or known is None else [known * each for each in bounds],
            median_ms=None if change is None or baseline_ms is None else baseline_ms * (1 + change),
            interval_ms=None
            if ends is None or baseline_ms is None
            else [baseline_ms * (1 + end) for end in ends],
            baseline_mean_ms=baseline_ms if proposal.in_some_steps else None,
            change=change,
            change_interval=ends,
            trials_ms=[
                level_ms(trial, proposal.in_some_steps) for trial in trials if logs and len(trial.step_ms)
            ],
            steps=sum(len(trial.step_ms) for trial in trials),
            trials=len(trials),
            verdict=arm.decided or ("same" if trials else "not applied"),
            why=_why(arm, trials, ends),
            results=results.value,
            parity=parity(self._baseline, trials, results),
        )


def _why(arm: _Arm, trials: Sequence[Trial], ends: Sequence[float] | None) -> str:
    if trials and arm.decided == "failed":
        return trials[-1].why[:_MOST_WHY]
    if trials and arm.decided == "not applied":
        return trials[-1].refused[:_MOST_WHY]
    if not trials:
        return "no trial of it came to an end"
    if not arm.decided and arm.is_dropped:
        return "dropped from further rounds: others were faster"
    if not arm.decided and ends is None:
        each = " and ".join(f"{level_ms(trial, arm.proposal.in_some_steps):.3g} ms" for trial in trials)
        return f"{len(trials)} of the {LEAST_ROUNDS} rounds that a verdict needs ({each})"
    return "" if arm.decided else "trials differ by more than the change gains: more trials would decide"


def _summary(trial: Trial) -> str:
    if trial.why:
        return f"failed, {trial.why}"
    return f"{np.median(trial.step_ms):.1f} ms per step ({len(trial.step_ms)} steps)"
