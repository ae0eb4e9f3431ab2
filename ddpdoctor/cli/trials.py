"""``ddpdoctor try``: what a change to the job brings, measured."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.diagnosis_of import diagnosis_at
from ddpdoctor.cli.finite import FiniteRange
from ddpdoctor.cli.numpy_threads import import_numpy_single_threaded
from ddpdoctor.cli.outputs import check_outputs, output_file, say_written, to_stdout
from ddpdoctor.cli.patch import write_patch
from ddpdoctor.cli.say import say
from ddpdoctor.cli.shell_completion import runs, setting_names
from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.plain import plain

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.experiment import Proposal, TrialsReport

_STEPS, _LEAST_STEPS, _MOST_STEPS = 60, 40, 400
_FEWEST_STEPS = 12
_TRIAL_S = 8.0
"""Of training that a trial is to hold, where the run tells how long a step takes: enough for a median within 1 or 2 %."""
_BUDGET_S = 900.0
_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "srun")


class _TryCommand(click.Command):
    """Everything behind ``--`` is the job's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the job's words from click."""
        ours, job = args, list[str]()
        if "--" in args:
            place = args.index("--")
            ours, job = args[:place], args[place + 1 :]
        ctx.meta["ddpdoctor.job"] = job
        return super().parse_args(ctx, ours)


@click.command("try", cls=_TryCommand, options_metavar="[OPTIONS] [-- COMMAND [ARGS]...]")
@click.argument("run", required=False, metavar="[RUN]", shell_complete=runs)
@click.option("--all", "everything", is_flag=True, help="Try everything that RUN's findings suggest.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=setting_names,
    help="Try this setting; several are tried one by one, and together. `--list` names them.",
)
@click.option(
    "--tune",
    type=click.Choice(["loader", "ddp"]),
    help="Search workers and prefetching, or bucket sizes; slow settings are dropped early.",
)
@click.option("--bounds", is_flag=True, help="With --all: also measure what a fix could gain at most.")
@click.option("--list", "listed", is_flag=True, help="List the settings and exit.")
@click.option(
    "--steps",
    type=click.IntRange(_FEWEST_STEPS, 1_000_000),
    metavar="N",
    help=f"Steps of each trial. [default: {_TRIAL_S:g} s of training, {_LEAST_STEPS} to {_MOST_STEPS}]",
)
@click.option("--rounds", type=click.IntRange(1, 50), metavar="N", help="Most trials of each change.")
@click.option(
    "--budget",
    type=FiniteRange(min=1),
    default=_BUDGET_S,
    show_default=True,
    metavar="S",
    help="Most seconds for all trials together.",
)
@click.option(
    "--cwd",
    "where",
    type=click.Choice(["here", "copy"]),
    default="here",
    show_default=True,
    help="Run trials in the working directory, or each in a copy of it.",
)
@output_file("--json", "json_file", says="Write the answer as JSON.")
@output_file("--patch", says="Write the best change as a unified diff.")
@click.pass_context
def command(
    ctx: click.Context,
    run: str | None,
    everything: bool,
    settings: tuple[str, ...],
    tune: str | None,
    bounds: bool,
    listed: bool,
    steps: int | None,
    rounds: int | None,
    budget: float,
    where: str,
    json_file: Path | None,
    patch: Path | None,
) -> None:
    """Run the job again for some steps, with and without a change in turn, and say what the change gains.

    The script is not edited: ddpdoctor changes the settings in the running job, and ends each trial between two steps. While it
    runs, a trial does what the job does: it writes the same files and reports to the same services.

    RUN is a run directory, a diagnosis.json or a report. Without a command, lists what can be tried.

    \b
    Examples:
      ddpdoctor try ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor try ddpdoctor-runs/20260101T120000Z-train --all -- torchrun --nproc-per-node 8 train.py
      ddpdoctor try --set loader.num_workers=4 --set ddp.bucket_cap_mb=50 -- torchrun --nproc-per-node 8 train.py
    """
    import_numpy_single_threaded()
    from ddpdoctor.diagnose.trials import MAX_SETTINGS, MAX_VARIANTS
    from ddpdoctor.experiment import informed, of_settings, parse_setting, proposals, tuning
    from ddpdoctor.written import PATCH, TRIALS

    job: list[str] = ctx.meta["ddpdoctor.job"]
    if listed:
        _list_settings()
        return
    read = [*([] if run is None else [run]), *(word for word in job if os.path.isfile(word))]  # noqa: PTH113
    check_outputs(read, {"--json": (json_file, TRIALS), "--patch": (patch, PATCH)})
    chosen = of_settings([parse_setting(text) for text in settings])
    if tune is not None:
        chosen += tuning(tune, _ranks_here(job))
    if run is None and not chosen:
        raise DdpDoctorError(
            "say what to try: a run directory, or --set NAME=VALUE (`ddpdoctor try --list` names them)."
        )
    diagnosis = None if run is None else _diagnosis(run)
    suggested = [] if diagnosis is None else proposals(diagnosis, bounds=bounds)
    if diagnosis is not None:
        known = proposals(diagnosis, bounds=True)
        chosen = [informed(each, known) for each in chosen]
    asked = [each.settings for each in chosen]
    suggested = [each for each in suggested if each.settings not in asked]
    if not job:
        words = [
            *(word for text in settings for word in ("--set", text)),
            *(["--tune", tune] if tune else []),
        ]
        _list_proposals(suggested, chosen, run, [*words, *(["--bounds"] if bounds else [])])
        return
    tried = [*chosen, *(suggested if everything or not chosen else [])]
    if not tried:
        raise DdpDoctorError(
            "nothing that RUN's findings suggest can be tried without editing the script: name a setting with --set."
        )
    if len(tried) > MAX_VARIANTS or any(len(each.settings) > MAX_SETTINGS for each in tried):
        raise DdpDoctorError(
            f"too much at once: at most {MAX_VARIANTS} changes, of {MAX_SETTINGS} settings each."
        )
    _measure(
        job,
        tried,
        diagnosis,
        run,
        _TrialOptions(steps, rounds, budget, where == "copy", json_file, patch, tune is not None),
    )


@dataclass(frozen=True)
class _TrialOptions:
    """How to measure, and what to write."""

    steps: int | None
    rounds: int | None
    budget_s: float
    copy: bool
    json_file: Path | None
    patch: Path | None
    halving: bool


def _diagnosis(run: str) -> Diagnosis:
    """That of the run directory itself where it was made, else a new one."""
    from ddpdoctor.report.read import holds_diagnosis
    from ddpdoctor.rundir import DIAGNOSIS_FILE

    made = Path(run) / DIAGNOSIS_FILE
    return diagnosis_at(str(made) if holds_diagnosis(made) else run)


def _list_settings() -> None:
    from ddpdoctor.experiment.settings import SETTINGS

    for setting in SETTINGS.values():
        say(f"{setting.name:30} {setting.says}: {setting.takes} ({setting.results.value})")
    say("env.VARIABLE                   an environment variable of NCCL, Gloo, CUDA, OpenMP and the like")


def _list_proposals(
    suggested: Sequence[Proposal], chosen: Sequence[Proposal], run: str | None, asked: Sequence[str]
) -> None:
    every = ["--all"] if suggested else []
    words = ["ddpdoctor", "try", *([] if run is None else [run]), *asked, *every]
    print_proposals([*chosen, *suggested], f"{shlex.join(words)} -- COMMAND")


def print_proposals(proposals: Sequence[Proposal], measured_by: str) -> None:
    """What could be tried, and what each is expected to bring; ``measured_by`` is the command that tells."""
    if not proposals:
        say("Nothing that the findings suggest can be tried without editing the script.")
        return
    for proposal in proposals:
        say(f"{plain(proposal.words)}{_expectation(proposal)}")
        if proposal.finding:
            say(f"    {plain(proposal.finding)}: {plain(proposal.title)}")
    say(f"To measure them: {measured_by}")


def _expectation(proposal: Proposal) -> str:
    from ddpdoctor.report.words import percent

    left, ends = proposal.expected_share, proposal.expected_share_range
    if left is None:
        return ""
    bounded = ends is not None and ends[1] >= 1
    saved = percent(1 - (ends[0] if bounded and ends else left))
    return f"  (expected to save {'at most ' if bounded else ''}{saved} of the step time)"


def _measure(
    job: list[str],
    proposals: Sequence[Proposal],
    diagnosis: Diagnosis | None,
    run: str | None,
    wishes: _TrialOptions,
) -> None:
    from rich.console import Console

    from ddpdoctor.cli.child import take_interrupts_as_exceptions
    from ddpdoctor.experiment import Budget, Command, Experiment, Plan, as_json
    from ddpdoctor.launch.alone import inherited_environment
    from ddpdoctor.launch.privacy import mask_command
    from ddpdoctor.report import experiment_view
    from ddpdoctor.written import TRIALS, write_file

    step_ms = diagnosis.steps.mean_ms if diagnosis is not None else None
    plan = Plan(
        command=Command(job, inherited_environment(), wishes.copy),
        proposals=proposals,
        steps=wishes.steps or _steps(diagnosis),
        to_the_end=wishes.steps is not None,
        budget=Budget(wishes.budget_s),
        step_ms=step_ms,
        halving=wishes.halving,
        **({} if wishes.rounds is None else {"rounds": wishes.rounds}),
    )
    changes = "1 change" if len(proposals) == 1 else f"{len(proposals)} changes"
    say(
        f"ddpdoctor: {changes} to be measured, in trials of {plan.steps} steps each, in turn with the unchanged job, in at most "
        f"{wishes.budget_s / 60:.0f} min."
        + (
            ""
            if wishes.copy
            else " Each writes the files that the job writes until then (--cwd copy: into a copy)."
        ),
        err=True,
    )
    experiment = Experiment(plan, lambda words: say(f"ddpdoctor: {words}", err=True))
    interrupted = False
    take_interrupts_as_exceptions()  # a second one would leave what the first has ended in good order
    try:
        experiment.run()
    except KeyboardInterrupt:
        interrupted = True
    answer = experiment.answer(mask_command(job))
    experiment_view.print_experiment(answer, Console(stderr=to_stdout([wishes.json_file, wishes.patch])))
    if run is not None and any(variant.trials for variant in answer.variants):
        _keep(answer, Path(run))
    if wishes.json_file is not None:
        write_file(wishes.json_file, as_json(answer), TRIALS)
        say_written([wishes.json_file], err=True)
    if wishes.patch is not None:
        write_patch(answer, diagnosis, job, wishes.patch)
    if interrupted:
        raise SystemExit(130)
    if answer.baseline.median_ms is None:
        raise UnusableInput(f"the unchanged job could not be measured: {answer.baseline.failed[0]}")


def _ranks_here(job: Sequence[str]) -> int:
    """Ranks that the command starts on this host, as far as its words tell; else one. ``-n`` is a number of ranks only behind
    a launcher of MPI or Slurm: ``nice -n 10`` and ``conda run -n env`` mean something else."""

    def number(words: Sequence[str], *names: str) -> int:
        for word, value in zip(words, (*words[1:], ""), strict=False):
            name, equals, own = word.partition("=")
            given = own if equals else value
            if name.replace("_", "-") in names and given.isdecimal():
                return int(given)
        return 0

    behind = next((job[place:] for place, word in enumerate(job) if Path(word).name in _LAUNCHERS), [])
    return (
        number(job, "--nproc-per-node", "--num-processes")
        or number(behind, "-n", "-np", "--n", "--np", "--ntasks")
        or 1
    )


def _steps(diagnosis: Diagnosis | None) -> int:
    """Of a trial where nobody says: not so many as the run had, at whose end the script may write what shall stay."""
    if diagnosis is None or not diagnosis.steps.mean_ms:
        return _STEPS
    wished = max(_LEAST_STEPS, min(_MOST_STEPS, round(_TRIAL_S * 1e3 / diagnosis.steps.mean_ms)))
    whole = diagnosis.steps.source == "step-log"  # saved traces are of a part of the job
    return max(_FEWEST_STEPS, min(wished, diagnosis.steps.count - 1)) if whole else wished


def _keep(answer: TrialsReport, run: Path) -> None:
    """Beside the diagnosis of a run directory; what was measured before is kept."""
    from ddpdoctor.experiment import TRIALS_FILE, write_trials
    from ddpdoctor.rundir import MANIFEST_FILE
    from ddpdoctor.written import TRIALS, check_file

    if not (run / MANIFEST_FILE).is_file():
        return
    place = run / TRIALS_FILE
    earlier = None
    try:
        check_file(place, TRIALS)
        if place.exists():
            earlier = _copied_beside(place)
        write_trials(answer, place)
    except (OSError, DdpDoctorError) as error:
        if earlier is not None:
            earlier.unlink(missing_ok=True)
        words = (
            f"{place} cannot be written ({error.strerror or error})." if isinstance(error, OSError) else error
        )
        say(f"ddpdoctor: {words}", err=True)
        return
    say(f"written: {place}", err=True)


def _copied_beside(place: Path) -> Path:
    """A copy of ``place`` under the first free name; its path. Raises OSError."""
    content = place.read_bytes()
    for number in range(1, 1 << 20):
        copy = place.with_name(f"{place.stem}-{number}{place.suffix}")
        with contextlib.suppress(FileExistsError), copy.open("xb") as out:
            out.write(content)
            return copy
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
