"""``ddpdoctor try``: measure what a change to the job gains."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.completion import runs, setting_names
from ddpdoctor.cli.options import FiniteRange, check_outputs, output_file, say_written, to_stdout
from ddpdoctor.cli.session import diagnosis_at, import_numpy_single_threaded, say
from ddpdoctor.errors import DdpDoctorError, UnusableInput

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.diagnose.trials import TrialsReport, Variant
    from ddpdoctor.experiment import Proposal

_DEFAULT_STEPS, _MIN_STEPS, _MAX_STEPS = 60, 40, 400
_MIN_MEASURED_STEPS = 12
_TRIAL_S = 8.0
"""Training time of a trial if the run's step time is known, which gives the median within 1 or 2 %."""
_BUDGET_S = 900.0


class _TryCommand(click.Command):
    """A command whose arguments after ``--`` are the job's command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments before ``--``, and store the others in ``ctx.meta["ddpdoctor.job"]``."""
        own, job = args, list[str]()
        if "--" in args:
            separator = args.index("--")
            own, job = args[:separator], args[separator + 1 :]
        ctx.meta["ddpdoctor.job"] = job
        return super().parse_args(ctx, own)


@click.command("try", cls=_TryCommand, options_metavar="[OPTIONS] [-- COMMAND [ARGS]...]")
@click.argument("run", required=False, metavar="[RUN]", shell_complete=runs)
@click.option("--all", "try_all", is_flag=True, help="Try everything that RUN's findings suggest.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    shell_complete=setting_names,
    help="Try this setting; can be repeated: each is tried alone, then all together. `--list` lists them.",
)
@click.option(
    "--tune",
    type=click.Choice(["loader", "ddp"]),
    help="Search for the best workers and prefetching, or bucket sizes; slow settings are dropped early.",
)
@click.option("--bounds", is_flag=True, help="With --all: also measure upper bounds of what fixes can gain.")
@click.option("--list", "list_settings", is_flag=True, help="List the settings and exit.")
@click.option(
    "--steps",
    type=click.IntRange(_MIN_MEASURED_STEPS, 1_000_000),
    metavar="N",
    help=f"Steps of each trial. [default: {_TRIAL_S:g} s of training, {_MIN_STEPS} to {_MAX_STEPS}]",
)
@click.option("--rounds", type=click.IntRange(1, 50), metavar="N", help="Most trials per change.")
@click.option(
    "--budget",
    type=FiniteRange(min=1),
    default=_BUDGET_S,
    show_default=True,
    metavar="S",
    help="Time limit for all trials together, in seconds.",
)
@click.option(
    "--cwd",
    "where",
    type=click.Choice(["here", "copy"]),
    default="here",
    show_default=True,
    help="Run trials in the working directory, or each trial in a copy of it.",
)
@output_file("--json", "json_file", help_text="Write the results as JSON.")
@output_file("--patch", help_text="Write the best change as a unified diff.")
@click.pass_context
def command(
    ctx: click.Context,
    run: str | None,
    try_all: bool,
    settings: tuple[str, ...],
    tune: str | None,
    bounds: bool,
    list_settings: bool,
    steps: int | None,
    rounds: int | None,
    budget: float,
    where: str,
    json_file: Path | None,
    patch: Path | None,
) -> None:
    """Run the job again for some steps, alternating with and without a change, and measure what the change gains.

    The script is not edited: ddpdoctor changes the settings in the running job and ends each trial between two steps. A
    trial has the same effects as the job: it writes the same files and reports to the same services.

    RUN is a run directory, a diagnosis.json or a report. Without COMMAND, the possible changes are listed.

    \b
    Examples:
      ddpdoctor try ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor try ddpdoctor-runs/20260101T120000Z-train --all -- torchrun --nproc-per-node 8 train.py
      ddpdoctor try --set loader.num_workers=4 --set ddp.bucket_cap_mb=50 -- torchrun --nproc-per-node 8 train.py
    """
    import_numpy_single_threaded()
    from ddpdoctor.experiment import parse_setting, proposals_for, tuning
    from ddpdoctor.written import PATCH, TRIALS

    job: list[str] = ctx.meta["ddpdoctor.job"]
    if list_settings:
        _list_settings()
        return
    inputs = [*([] if run is None else [run]), *(word for word in job if os.path.isfile(word))]  # noqa: PTH113
    check_outputs(inputs, {"--json": (json_file, TRIALS), "--patch": (patch, PATCH)})
    chosen = proposals_for([parse_setting(text) for text in settings])
    diagnosis = None if run is None else _diagnosis(run)
    if tune is not None:
        chosen += tuning(tune, _ranks_here(job, diagnosis))
    if run is None and not chosen:
        raise DdpDoctorError(
            "nothing to try: give a run directory, or --set NAME=VALUE (`ddpdoctor try --list` lists the settings)."
        )
    suggested: list[Proposal] = []
    if diagnosis is not None:
        chosen, suggested = _with_suggestions(chosen, diagnosis, bounds)
    if not job:
        arguments = [
            *(word for text in settings for word in ("--set", text)),
            *(["--tune", tune] if tune else []),
        ]
        _list_proposals(suggested, chosen, run, [*arguments, *(["--bounds"] if bounds else [])])
        return
    proposals = [*chosen, *(suggested if try_all or not chosen else [])]
    _check_number(proposals)
    _measure(
        job,
        proposals,
        diagnosis,
        run,
        steps=steps,
        rounds=rounds,
        budget_s=budget,
        copy=where == "copy",
        halving=tune is not None,
        json_file=json_file,
        patch=patch,
    )


def _ranks_here(job: Sequence[str], diagnosis: Diagnosis | None) -> int:
    """Number of ranks of the job on this host, from the command or else from the run; 1 if unknown."""
    from ddpdoctor.report.summary import ranks_of_command

    ranks = ranks_of_command(job)
    if ranks is None and diagnosis is not None and diagnosis.job.world_size:
        ranks = diagnosis.job.world_size // max(len(set(diagnosis.job.hosts)), 1)
    return ranks or ranks_of_command(job, search_all_words=True) or 1


def _with_suggestions(
    chosen: Sequence[Proposal], diagnosis: Diagnosis, bounds: bool
) -> tuple[list[Proposal], list[Proposal]]:
    """(``chosen`` with the savings that the findings predict, other changes that the findings suggest)."""
    from ddpdoctor.experiment import proposals, with_expectation

    all_proposals = proposals(diagnosis, bounds=True)
    chosen_settings = [each.settings for each in chosen]
    suggested = [each for each in proposals(diagnosis, bounds=bounds) if each.settings not in chosen_settings]
    return [with_expectation(each, all_proposals) for each in chosen], suggested


def _check_number(proposals: Sequence[Proposal]) -> None:
    """Raise DdpDoctorError if there is no change to try, or too many."""
    from ddpdoctor.diagnose.trials import MAX_SETTINGS, MAX_VARIANTS

    if not proposals:
        raise DdpDoctorError(
            "the findings of RUN suggest no change that can be tried without editing the script: give a setting with --set."
        )
    if len(proposals) > MAX_VARIANTS or any(len(each.settings) > MAX_SETTINGS for each in proposals):
        raise DdpDoctorError(
            f"too many changes: at most {MAX_VARIANTS} at once, with at most {MAX_SETTINGS} settings each."
        )


def _diagnosis(run: str) -> Diagnosis:
    """The diagnosis stored in the run directory, else a new one."""
    from ddpdoctor.report.read import holds_diagnosis
    from ddpdoctor.rundir import DIAGNOSIS_FILE

    diagnosis_file = Path(run) / DIAGNOSIS_FILE
    return diagnosis_at(str(diagnosis_file) if holds_diagnosis(diagnosis_file) else run)


def _list_settings() -> None:
    from ddpdoctor.experiment.settings import SETTINGS

    for setting in SETTINGS.values():
        say(f"{setting.name:30} {setting.says}: {setting.takes} ({setting.results.value})")
    say("env.VARIABLE                   an environment variable of NCCL, Gloo, CUDA, OpenMP and the like")


def _list_proposals(
    suggested: Sequence[Proposal], chosen: Sequence[Proposal], run: str | None, options: Sequence[str]
) -> None:
    """Print the changes that can be tried, their expected savings, and the command that measures them."""
    if not (chosen or suggested):
        say("The findings suggest no change that can be tried without editing the script.")
        return
    for proposal in (*chosen, *suggested):
        say(f"{proposal.words}{_expected_saving(proposal)}")
        if proposal.finding:
            say(f"    {proposal.finding}: {proposal.title}")
    arguments = [
        "ddpdoctor",
        "try",
        *([] if run is None else [run]),
        *options,
        *(["--all"] if suggested else []),
    ]
    say(f"To measure them: {shlex.join(arguments)} -- COMMAND")


def _expected_saving(proposal: Proposal) -> str:
    from ddpdoctor.report.words import percent

    remaining, ends = proposal.expected_share, proposal.expected_share_range
    if remaining is None:
        return ""
    is_upper_bound = ends is not None and ends[1] >= 1
    saved = percent(1 - (ends[0] if is_upper_bound and ends else remaining))
    return f"  (expected to save {'at most ' if is_upper_bound else ''}{saved} of the step time)"


def _measure(
    job: list[str],
    proposals: Sequence[Proposal],
    diagnosis: Diagnosis | None,
    run: str | None,
    *,
    steps: int | None,
    rounds: int | None,
    budget_s: float,
    copy: bool,
    halving: bool,
    json_file: Path | None,
    patch: Path | None,
) -> None:
    from rich.console import Console

    from ddpdoctor.cli.child import take_interrupts_as_exceptions
    from ddpdoctor.diagnose.trials import as_json
    from ddpdoctor.experiment import Budget, Command, Experiment, Plan
    from ddpdoctor.launch.alone import inherited_environment
    from ddpdoctor.report import experiment_view
    from ddpdoctor.report.words import seconds, strip_zeros
    from ddpdoctor.rundir.privacy import mask_command
    from ddpdoctor.written import TRIALS, write_file

    step_ms = diagnosis.steps.mean_ms if diagnosis is not None else None
    plan = Plan(
        command=Command(job, inherited_environment(), copy),
        proposals=proposals,
        steps=steps or _trial_steps(diagnosis),
        to_the_end=steps is not None,
        run_steps=_run_steps(diagnosis),
        budget=Budget(budget_s),
        step_ms=step_ms,
        halving=halving,
        **({} if rounds is None else {"rounds": rounds}),
    )
    changes = "1 change" if len(proposals) == 1 else f"{len(proposals)} changes"
    say(
        f"ddpdoctor: {changes} to measure, in trials of {plan.steps} steps, alternating with the unchanged job, in at most "
        f"{strip_zeros(seconds(budget_s))}."
        + (
            ""
            if copy
            else " Each trial writes the files that the job writes in these steps (--cwd copy: into a copy)."
        ),
        err=True,
    )
    experiment = Experiment(plan, lambda sentence: say(f"ddpdoctor: {sentence}", err=True))
    interrupted = False
    take_interrupts_as_exceptions()  # a second interrupt must not disturb the clean-up after the first
    try:
        experiment.run()
    except KeyboardInterrupt:
        interrupted = True
    results = experiment.answer(mask_command(job))
    experiment_view.print_experiment(results, Console(stderr=to_stdout([json_file, patch])))
    if run is not None and any(variant.trials for variant in results.variants):
        _store_results(results, Path(run))
    if json_file is not None:
        write_file(json_file, as_json(results), TRIALS)
        say_written([json_file], err=True)
    if patch is not None:
        write_patch(results, diagnosis, job, patch)
    if interrupted:
        raise SystemExit(130)
    if results.baseline.median_ms is None:
        raise UnusableInput(f"the unchanged job could not be measured: {results.baseline.failed[0]}")


def _trial_steps(diagnosis: Diagnosis | None) -> int:
    """Steps of a trial without --steps. They are fewer than the run had, because a script may overwrite results at its end."""
    if diagnosis is None or not diagnosis.steps.mean_ms:
        return _DEFAULT_STEPS
    wanted = max(_MIN_STEPS, min(_MAX_STEPS, round(_TRIAL_S * 1e3 / diagnosis.steps.mean_ms)))
    whole = _run_steps(diagnosis)
    return wanted if whole is None else max(_MIN_MEASURED_STEPS, min(wanted, whole - 1))


def _run_steps(diagnosis: Diagnosis | None) -> int | None:
    """Number of steps of the run; None if unknown: traces cover only a part of the job."""
    if diagnosis is None or diagnosis.steps.source != "step-log":
        return None
    return diagnosis.steps.count or None


def _store_results(results: TrialsReport, run: Path) -> None:
    """Write ``results`` into the run directory. An existing file is kept under another name."""
    from ddpdoctor.diagnose.trials import TRIALS_FILE, write_trials
    from ddpdoctor.rundir import MANIFEST_FILE
    from ddpdoctor.written import TRIALS, check_file

    if not (run / MANIFEST_FILE).is_file():
        return
    path = run / TRIALS_FILE
    backup = None
    try:
        check_file(path, TRIALS)
        if path.exists():
            backup = _back_up(path)
        write_trials(results, path)
    except (OSError, DdpDoctorError) as error:
        if backup is not None:
            backup.unlink(missing_ok=True)
        message = (
            f"{path} cannot be written ({error.strerror or error})." if isinstance(error, OSError) else error
        )
        say(f"ddpdoctor: {message}", err=True)
        return
    say(f"written: {path}", err=True)


def _back_up(path: Path) -> Path:
    """Copy ``path`` to the first free name with a number; returns the copy's path. Raises OSError."""
    content = path.read_bytes()
    for number in range(1, 1 << 20):
        copy = path.with_name(f"{path.stem}-{number}{path.suffix}")
        with contextlib.suppress(FileExistsError), copy.open("xb") as out:
            out.write(content)
            return copy
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def write_patch(results: TrialsReport, diagnosis: Diagnosis | None, job: Sequence[str], path: Path) -> None:
    """Write the patch of the best change to ``path``, and print its path or why there is none to stderr. Raises DdpDoctorError."""
    from ddpdoctor.experiment import patch_of
    from ddpdoctor.written import PATCH, write_file

    best = results.best()
    if best is None:
        say("ddpdoctor: no patch, because no change is significantly faster.", err=True)
        return
    for file, line in _candidate_lines(diagnosis, best, job):
        if not Path(file).is_file():  # reading a device or a pipe may not end
            continue
        try:
            text = Path(file).read_bytes().decode("utf-8")  # keeps line ends
        except (OSError, UnicodeDecodeError):
            continue
        diff = patch_of(text, _relative_path(file), line, best.settings)
        if diff is not None:
            write_file(path, diff, PATCH)
            say_written([path], err=True)
            return
    say(
        "ddpdoctor: no patch, because the constructor's line is unknown or its arguments are not literals there.",
        err=True,
    )


def _candidate_lines(
    diagnosis: Diagnosis | None, best: Variant, job: Sequence[str]
) -> Iterator[tuple[str, int | None]]:
    """(File, line) that may build the object of the settings, most likely first. The job's script, without a line, is last, unless the
    file is known."""
    is_built_at_known = False
    if diagnosis is not None:
        for kind in ("loader", "ddp"):
            if any(name.startswith(f"{kind}.") for name in best.settings):
                known = diagnosis.facts.get(kind)
                where = known.get("where") if isinstance(known, dict) else None
                file = where.get("file") if isinstance(where, dict) else None
                if isinstance(where, dict) and isinstance(file, str):
                    line, is_built_at_known = where.get("line"), Path(file).is_file()
                    yield file, line if isinstance(line, int) else 0
        own_findings = [finding for finding in diagnosis.findings if finding.rule == best.finding]
        others = [finding for finding in diagnosis.findings if finding.rule != best.finding]
        yield from (
            (place.file, place.line) for finding in (*own_findings, *others) for place in finding.where
        )
    if not is_built_at_known:  # else a call in the script may belong to another object
        yield from ((word, None) for word in job if word.endswith(".py"))


def _relative_path(file: str) -> str:
    path = os.path.relpath(file)
    return file.lstrip("/") if path.startswith("..") else path
