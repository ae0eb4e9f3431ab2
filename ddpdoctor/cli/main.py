"""The command group, and the conversion of exceptions to a message on stderr and an exit code."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import sys
from typing import NoReturn

import click

import ddpdoctor
from ddpdoctor.errors import DdpDoctorError, did_you_mean
from ddpdoctor.plain import plain, plain_lines
from ddpdoctor.process import flush_stdout, prepare_streams

VERBS = {
    "run": "Run a job unchanged, record its ranks, and diagnose it",
    "watch": "Show a run while the job is running",
    "stacks": "Print where each rank of a running job is now",
    "capture": "Profile some steps of a running job, on all ranks",
    "analyze": "Diagnose recorded runs or profiler traces",
    "bundle": "Write one file that records jobs where ddpdoctor is not installed",
    "digest": "Shrink traces to small files, to analyze elsewhere",
    "compare": "Compare two recordings of a job",
    "history": "Show many runs over time, and when the step time changed",
    "try": "Measure what a change gains without editing the script",
    "export": "Export to Perfetto, Parquet, CSV, TensorBoard, MLflow, W&B",
    "rules": "List, show and test the rules behind the findings",
    "doctor": "Check what this machine and the job's Python support",
    "demo": "Train a small model with a planted fault, and diagnose it",
    "completion": "Print the completion script for a shell",
}
"""Verbs with their descriptions, so that ``ddpdoctor --help`` does not import the commands."""
MODULES = {"try": "trials"}
"""Modules of commands whose name is a Python keyword."""
EXIT_UNUSABLE = 2
TRACEBACK = "DDPDOCTOR_TRACEBACK"
"""Environment variable that makes unexpected errors print a traceback."""
_MAX_MESSAGE_LENGTH = 200
_COLLECTED_OBJECTS = 100_000
"""Threshold of the garbage collector. With Python's default of 700, it takes a tenth of the CPU time of a small analysis."""
_EXIT_INTERRUPTED = 130


class Group(click.Group):
    """click.Group that suggests similar commands. Older versions of click do not, and newer ones only for loaded commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command named by the first of ``args``. Raises click.UsageError, with a suggestion, if it does not exist."""
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """Imports a command's module only when it is used, so that ``run`` starts the job without loading the analysis."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of the help text."""
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs with their descriptions."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, f"{purpose}.") for verb, purpose in VERBS.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The click command of a verb; None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        found = importlib.import_module(f"ddpdoctor.cli.{MODULES.get(cmd_name, cmd_name)}").command
        assert isinstance(found, click.Command)
        return found


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ddpdoctor.__version__, prog_name="ddpdoctor", message="%(prog)s %(version)s")
def cli() -> None:
    """Finds out why a PyTorch DistributedDataParallel job is slow.

    \b
    Examples:
      ddpdoctor run -- torchrun --nproc-per-node 8 train.py
      ddpdoctor analyze ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor demo
    """


def main() -> NoReturn:
    """Entry point of the ``ddpdoctor`` command."""
    gc.set_threshold(_COLLECTED_OBJECTS)
    # The collections at the end of the process take 5 to 8 % of the CPU time of a small analysis, and free nothing.
    atexit.register(gc.freeze)
    prepare_streams()
    try:
        code = cli.main(prog_name="ddpdoctor", standalone_mode=False)
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        _print_error(plain_lines(text.getvalue()))
        code = error.exit_code
    except DdpDoctorError as error:
        _print_sentence(f"ddpdoctor: {error}")
        code = EXIT_UNUSABLE
    except (KeyboardInterrupt, click.Abort):
        code = _EXIT_INTERRUPTED
    except BrokenPipeError:
        code = 1
    except OSError as error:
        reason = (error.strerror or str(error) or type(error).__name__).lower()
        named = isinstance(error.filename, (str, bytes))
        _print_sentence(
            f"ddpdoctor: {os.fsdecode(error.filename)}: {reason}." if named else f"ddpdoctor: {reason}."
        )
        code = EXIT_UNUSABLE
    except Exception as error:
        _print_sentence(f"ddpdoctor: {_defect_text(error)}")
        code = EXIT_UNUSABLE
    sys.exit(flush_stdout(code if isinstance(code, int) else 0))


def _defect_text(error: Exception) -> str:
    """The message for an unexpected error, which is a bug in ddpdoctor."""
    if os.environ.get(TRACEBACK):
        import traceback

        _print_error(plain_lines("".join(traceback.format_exception(error))))
    if isinstance(error, MemoryError):
        return "not enough memory; nothing was written."
    words = " ".join(str(error).split())[:_MAX_MESSAGE_LENGTH]
    summary = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return (
        f"stopped by a bug in ddpdoctor ({summary}). Please report it with the output of the same command under "
        f"{TRACEBACK}=1."
    )


def _print_sentence(sentence: str) -> None:
    _print_error(plain(sentence) + "\n")


def _print_error(text: str) -> None:
    try:
        click.echo(text, err=True, nl=False)
    except (OSError, ValueError):
        pass
