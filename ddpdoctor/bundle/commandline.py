"""Parses the options of ``run`` without click, from a table that was generated from click's command.

The syntax is the same: options come before the command, optionally separated by ``--``; the last of equal options counts.
"""

from __future__ import annotations

import getopt
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.errors import DdpDoctorError

Option = Mapping[str, Any]
"""``field``, ``names``, ``kind`` (``flag``, ``text``, ``path``, ``integer``, ``number``, ``choice``), ``default``, and optionally
``least`` and ``choices``."""


def parsed(arguments: Sequence[str], options: Sequence[Option]) -> tuple[dict[str, Any], list[str]]:
    """(value of each option by its field, the job's command). Raises DdpDoctorError if ``arguments`` are invalid."""
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
