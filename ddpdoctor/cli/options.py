"""Options of several commands, and checks that outputs do not overwrite inputs or each other."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddpdoctor.cli.session import say
from ddpdoctor.errors import DdpDoctorError

if TYPE_CHECKING:
    from ddpdoctor.written import Form

_Command = TypeVar("_Command", bound=Callable[..., Any])


def output_file(*names: str, help_text: str) -> Callable[[_Command], _Command]:
    """An option for an output file."""
    return click.option(*names, type=click.Path(path_type=Path), metavar="F", help=help_text)


def output_folder(*names: str, help_text: str) -> Callable[[_Command], _Command]:
    """An option for an output folder."""
    return click.option(
        *names, type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help=help_text
    )


job_option = click.option(
    "--job",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of the job to diagnose, if the traces are from several jobs.",
)


processes_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes that read traces. [default: one per CPU]",
)


def check_outputs(inputs: Sequence[str], outputs: Mapping[str, tuple[Path | None, Form]]) -> None:
    """Check ``outputs``: (path or None, kind of file) by option.

    Raises DdpDoctorError if an output is an input, is in a recording, cannot be written, is an existing file that ddpdoctor did not
    write, or is the same file as another output. Special files such as /dev/null can be given several times.
    """
    from ddpdoctor.written import check_file, is_stdout

    options: dict[object, str] = {}
    for option, (path, form) in outputs.items():
        if path is None:
            continue
        same: object = "-"
        if not is_stdout(path):
            special = os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113
            if not special and any(_is_read_from(source, path) for source in inputs):
                raise DdpDoctorError(f"{option} {path} would overwrite an input: name another file.")
            check_file(path, form)
            if special:
                continue
            same = _identity(path)
        if same in options:
            where = "standard output" if same == "-" else str(path)
            raise DdpDoctorError(f"{options[same]} and {option} would both write to {where}: name two files.")
        options[same] = option


def to_stdout(outputs: Iterable[Path | None]) -> bool:
    """Whether one of ``outputs`` is standard output, so that nothing else may be printed there."""
    from ddpdoctor.written import is_stdout

    return any(path is not None and is_stdout(path) for path in outputs)


def say_written(outputs: Iterable[Path | None], *, err: bool = False) -> None:
    """Print the paths of the written files, on stderr if ``err`` or if one of ``outputs`` is standard output."""
    from ddpdoctor.written import is_stdout

    files = [path for path in outputs if path is not None]
    for path in files:
        if not is_stdout(path):
            say(f"written: {path}", err=err or to_stdout(files))


def temporary_report() -> Path:
    """A path for a temporary report, in a new folder that only this user can read."""
    import tempfile

    return Path(tempfile.mkdtemp(prefix="ddpdoctor-")) / "report.html"


def open_in_browser(page: Path) -> None:
    """Open ``page`` in the user's browser, or print that none was found."""
    import webbrowser

    has_screen = sys.platform != "linux" or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    )
    if not has_screen or not webbrowser.open(page.resolve().as_uri()):
        say(f"no browser was found here; the report is {page}.", err=True)


def _is_read_from(source: str, path: Path) -> bool:
    """Whether ``path`` is read as part of the input ``source`` (a file, folder or pattern)."""
    from ddpdoctor.report.read import holds_diagnosis
    from ddpdoctor.rundir import run_directories
    from ddpdoctor.trace import find_traces
    from ddpdoctor.trace.formats import Candidate, file_of, is_trace
    from ddpdoctor.trace.operations import find_operations
    from ddpdoctor.trace.sources import is_url

    if is_url(source) or not os.path.exists(path):  # noqa: PTH110
        return False
    if Path(source).is_dir():
        inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source))
        if not inside or run_directories(source).runs or holds_diagnosis(path):
            return False
        return is_trace(Candidate(str(path))) or bool(find_operations(str(path)))
    if Path(source).exists():
        return path.samefile(source)
    try:
        return any(path.samefile(file_of(file)) for file in find_traces([source]).files)
    except DdpDoctorError:
        return False  # the command itself reports that nothing matches the pattern


def _identity(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


class FiniteRange(click.FloatRange):
    """A click.FloatRange that accepts only finite numbers. click.FloatRange accepts NaN, which is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """``value`` as a number. Raises click.BadParameter if it is not finite or out of bounds."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
