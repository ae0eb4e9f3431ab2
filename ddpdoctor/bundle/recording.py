"""The command of a bundle: ``python FILE run -- COMMAND`` records a job with the job's Python only.

It writes the same run directory as ``ddpdoctor run``, with the same code. Diagnosis needs NumPy, CEL and other packages, so it requires an
environment in which ddpdoctor is installed. The options of ``run`` are parsed without click, by a table that was generated from click's
command. The syntax is the same: options come before the command, optionally separated by ``--``; the last of repeated options counts.
"""

from __future__ import annotations

import getopt
import json
import math
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.options import asked_options
from ddpdoctor.launch.session import Outcome, run_job
from ddpdoctor.plain import plain
from ddpdoctor.process import flush_stdout, prepare_streams

Option = Mapping[str, Any]
"""``field``, ``names``, ``kind`` (``flag``, ``text``, ``path``, ``integer``, ``number``, ``choice``), ``default``, and optionally
``least`` and ``choices``."""


def parsed(arguments: Sequence[str], options: Sequence[Option]) -> tuple[dict[str, Any], list[str]]:
    """(Value of each option by its field, the job's command). Raises DdpDoctorError if ``arguments`` are invalid."""
    by_name = {name: option for option in options for name in option["names"]}
    letters = "".join(
        name[1] + ("" if option["kind"] == "flag" else ":")
        for name, option in by_name.items()
        if not name.startswith("--")
    )
    words = [
        name[2:] + ("" if option["kind"] == "flag" else "=")
        for name, option in by_name.items()
        if name.startswith("--")
    ]
    try:
        given, command = getopt.getopt(list(arguments), letters, words)
    except getopt.GetoptError as error:
        raise DdpDoctorError(f"{error.msg}.") from error
    values = {option["field"]: option["default"] for option in options}
    for name, text in given:
        option = by_name[name]
        values[option["field"]] = True if option["kind"] == "flag" else _value(name, text, option)
    if not command:
        raise DdpDoctorError(
            "no command: name the job's, as in `run -- torchrun --nproc-per-node 8 train.py`."
        )
    return values, command


def _value(name: str, text: str, option: Option) -> Any:
    kind = option["kind"]
    if kind == "text":
        return text
    if kind == "path":
        return Path(text)
    if kind == "choice":
        if text not in option["choices"]:
            raise DdpDoctorError(f"{name} {text}: it is one of {', '.join(option['choices'])}.")
        return text
    try:
        number = int(text) if kind == "integer" else float(text)
    except ValueError:
        raise DdpDoctorError(f"{name} {text}: not a number.") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise DdpDoctorError(f"{name} {text}: not a finite number.")
    if not number >= option["least"]:
        raise DdpDoctorError(f"{name} {text}: at least {option['least']:g}.")
    return number


BUILD_FILE = "made.json"
_EXIT_UNUSABLE, _EXIT_INTERRUPTED = 2, 130


def main() -> NoReturn:
    """Entry point of a bundle."""
    prepare_streams()
    try:
        code = _execute(sys.argv[1:])
    except DdpDoctorError as error:
        _print(str(error))
        code = _EXIT_UNUSABLE
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    except OSError as error:
        _print(f"{error}.")
        code = _EXIT_UNUSABLE
    sys.exit(flush_stdout(code))


def _execute(arguments: Sequence[str]) -> int:
    build = _build_info()
    verb = arguments[0] if arguments else "--help"
    if verb == "--version":
        parts = ", ".join(f"{name} {version}" for name, version in build["versions"].items())
        print(f"{parts}; records only; sha256 {build['sha256']}")
        return 0
    if verb in ("-h", "--help"):
        print(_usage())
        return 0
    if verb != "run":
        raise DdpDoctorError(
            f"this file records, and does nothing else: for `{verb}` install ddpdoctor, there or on "
            f"another machine, and say `ddpdoctor {' '.join(arguments)}`."
        )
    # Only directly after `run`: later arguments may be the job's.
    if any(word in ("-h", "--help") for word in arguments[1:2]):
        print(build["help"].replace("ddpdoctor run", f"{_program()} run"))
        return 0
    values, command = parsed(arguments[1:], build["options"])
    return _run(values, command)


def _run(values: dict[str, Any], command: list[str]) -> NoReturn:
    if values["prometheus"] is not None:
        raise DdpDoctorError(
            "--prometheus needs ddpdoctor installed where the job runs; without this option the job is recorded in the same way."
        )
    outcome = run_job(command, asked_options(values), warn=_print)
    for sentence in (*outcome.unsaved, *outcome.notes, *_next_steps(outcome)):
        _print(sentence)
    outcome.status.exit_this_process()


def _next_steps(outcome: Outcome) -> list[str]:
    """Sentence on what to do next, if something was recorded."""
    run = outcome.to_analyze
    if run is None:
        return []
    return [
        f"recorded in {run}; to diagnose it, say `ddpdoctor analyze {run}` where ddpdoctor is installed, here or on any machine that "
        "has that folder."
    ]


def _build_info() -> dict[str, Any]:
    """Build information of this bundle: versions, hash, options and help text of ``run``."""
    document: dict[str, Any] = json.loads(pkgutil.get_data("ddpdoctor.bundle", BUILD_FILE) or b"")
    return document


def _program() -> str:
    """The command line that starts this bundle, for messages."""
    return f"{Path(sys.executable or 'python').name} {sys.argv[0]}"


def _usage() -> str:
    return (
        f"Usage: {_program()} run [OPTIONS] [--] COMMAND [ARGS]...\n\n"
        "Runs COMMAND unchanged and records its ranks, with the job's own Python; nothing need be installed.\n"
        f"`{_program()} run --help` lists the options; `--version` says what this file was made of.\n"
        "The run directory is diagnosed by `ddpdoctor analyze RUN`, where ddpdoctor is installed."
    )


def _print(sentence: str) -> None:
    with suppress(OSError, ValueError):
        print(f"ddpdoctor: {plain(sentence)}", file=sys.stderr, flush=True)
