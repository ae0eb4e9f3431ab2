"""``ddpdoctor digest``: reduce traces to small files on the hosts of the ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.completion import runs
from ddpdoctor.cli.options import output_folder, processes_option
from ddpdoctor.cli.session import import_numpy_single_threaded, say, shown_progress
from ddpdoctor.errors import UnusableInput
from ddpdoctor.stages import Stage

if TYPE_CHECKING:
    from ddpdoctor.trace.digest import CreatedFiles

_MAX_REASONS = 3
"""Maximum number of reasons shown for an unreadable run."""


@click.command("digest")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=runs)
@output_folder(
    "--out",
    help_text="Folder to write. [default, in the working directory: NAME-digest; traces-digest for several paths, patterns and URLs]",
)
@processes_option
def command(paths: tuple[str, ...], out: Path | None, jobs: int | None) -> None:
    """Shrink a run directory or traces to small files, to analyze elsewhere.

    Run it where the traces are (on each host, if they are on several), copy its output to one place, and analyze
    that: the result is the same as with the traces.

    \b
    Examples:
      ddpdoctor digest ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor analyze 20260101T120000Z-train-digest
      ddpdoctor digest /local/traces --out /shared/digest
      ddpdoctor analyze /shared/digest
    """
    import_numpy_single_threaded()
    from ddpdoctor.rundir import is_run_directory
    from ddpdoctor.trace import find_traces
    from ddpdoctor.trace.digest import CreatedFiles, check_outside_run, loose_targets, write_digests

    target = out or _default_folder(paths)
    runs = [path for path in paths if is_run_directory(path)]
    if runs and len(paths) > 1:
        raise click.UsageError("run directories must be digested one at a time.")
    check_outside_run(target)
    copies = CreatedFiles()
    with shown_progress() as progress:
        if runs:
            targets, ranks = _copy_records(runs[0], target, copies)
        else:
            found = find_traces(paths)
            for note in found.notes:
                say(f"Note: {note}", err=True)
            targets, ranks = loose_targets(found.files, target), {}
        try:
            on_progress = partial(progress, Stage.TRACES)
            digest = write_digests(targets, ranks=ranks, jobs=jobs, progress=on_progress, copies=copies)
        except BaseException:
            if runs:
                copies.discard()
            raise
    for _, reason in digest.failed:
        say(f"Note: {reason}", err=True)
    if not digest.files and not runs:
        raise UnusableInput("No trace could be digested.")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    say(f"written: {target} ({len(digest.files)} trace(s), {size / 1e6:.1f} MB)")


def _copy_records(run: str, target: Path, copies: CreatedFiles) -> tuple[dict[str, Path], dict[str, int]]:
    """Copy the records of a run directory. Returns (digest path by trace, rank by trace). Raises UnusableInput if the ranks' records
    cannot be read."""
    from ddpdoctor.rundir import TRACE_FILE, NoteCode
    from ddpdoctor.rundir.draining import recover
    from ddpdoctor.rundir.reader import RunDirectory
    from ddpdoctor.trace.digest import TRACE_DIGEST, copy_run_directory, is_within

    for sentence in recover(run):
        say(f"Note: {sentence}", err=True)
    recorded = RunDirectory.open(run)
    unreadable = [note for note in recorded.notes if note.code is NoteCode.UNREADABLE and not recorded.ranks]
    if unreadable:
        raise UnusableInput(f"{run}: {' '.join(map(str, unreadable[:_MAX_REASONS]))}")
    for sentence in copy_run_directory(run, target, copies):
        say(f"Note: {sentence}", err=True)
    targets, ranks = {}, {}
    for record in recorded.ranks:
        trace = Path(record.path, TRACE_FILE)
        if trace.is_symlink() and not is_within(trace, run):
            say(f"Note: {trace} is a link out of the run directory and was skipped.", err=True)
        elif record.trace is not None:
            targets[record.trace] = target / Path(record.path).relative_to(run) / TRACE_DIGEST
            ranks[record.trace] = record.rank
    return targets, ranks


def _default_folder(paths: tuple[str, ...]) -> Path:
    """The default output folder. It is in the working directory, because the input's folder may belong to another user."""
    is_existing_path = len(paths) == 1 and Path(paths[0]).exists()
    name = Path(os.path.realpath(paths[0])).name if is_existing_path else ""
    return Path(f"{name or 'traces'}-digest")
