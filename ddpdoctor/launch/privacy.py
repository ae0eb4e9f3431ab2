"""A command line without secrets: what may be written down of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

from ddpdoctor.rundir.named import is_hash
from ddpdoctor.rundir.privacy import LONGEST_TEXT, MASK, mask_text, names_secret
from ddpdoctor.rundir.secretnames import ATTACHED_ONLY, SHORT_OPTIONS, holds_value, is_no_secret

LEFT_OUT = "..."
"""Stands for each argument beyond ``LONGEST_COMMAND``."""
LONGEST_COMMAND = 16 * LONGEST_TEXT
"""Letters of a command line that are kept: a list of ten thousand files is none that somebody reads."""
_ASSIGNED = re.compile(r"([\w.+~-]*\w)(=)")
_SETTING = re.compile(r"[A-Za-z]\w*[._]\w[\w.]*")
"""A name whose value is the next word: ``WANDB.API_KEY X`` of yacs, ``aws configure set aws_secret_access_key X``."""
_OPTION_OF_TEXT = re.compile(r"-\w*c")
"""What follows ``sh -c`` and ``python -c`` is a program, not a value."""
_INSIDE_PROGRAM = 64
"""Words after a program's name in which its short option is looked for."""


def mask_command(command: Iterable[str]) -> list[str]:
    """The command line with passwords, tokens and what looks like one replaced by ``***``; as many arguments
    as before.
    """
    masked: list[str] = []
    before = ""
    left = LONGEST_COMMAND
    short = _ShortOptions()
    for argument in command:
        left -= min(len(argument), LONGEST_TEXT)
        if left < 0:
            masked.append(LEFT_OUT)
        else:
            masked.append(short.masked(argument) or _mask_argument(argument, before))
        before = argument
    return masked


def _mask_argument(argument: str, before: str) -> str:
    if (
        before.startswith("-")
        and "=" not in before
        and names_secret(before)
        and holds_value(before, argument)
    ):
        return argument if is_no_secret(argument) else MASK
    if _SETTING.fullmatch(before) and names_secret(before) and not argument.startswith("-"):
        return argument if is_no_secret(argument) else MASK
    if before.startswith("-") and is_hash(before, argument):
        return argument
    if _OPTION_OF_TEXT.fullmatch(before):
        return mask_text(argument)
    # All of an argument is the value, also what stands after a space: --env=PASSWORD=two words
    position = 0
    while assigned := _ASSIGNED.match(argument, position):
        position = assigned.end()
        if names_secret(assigned[1]):
            value = argument[position:]
            return argument if is_no_secret(value) else mask_text(argument[:position]) + MASK
    return mask_text(argument)


class _ShortOptions:
    """The short options with a password of the program whose arguments are being read."""

    def __init__(self) -> None:
        self._program, self._left, self._is_next, self._words = "", 0, False, ("", "")

    def masked(self, argument: str) -> str | None:
        """``argument`` masked, None where it is none of these."""
        if self._is_next:
            self._is_next = False
            return MASK
        self._words = (self._words[1], PurePath(argument[:LONGEST_TEXT]).name)
        for program in (self._words[1], " ".join(self._words)):
            if program in SHORT_OPTIONS:
                self._program, self._left = program, _INSIDE_PROGRAM
                return None
        self._left -= 1
        if self._left < 0:
            return None
        for option in SHORT_OPTIONS[self._program]:
            if argument == option:
                self._is_next = self._program not in ATTACHED_ONLY
                return argument
            if argument.startswith(option) and not option.startswith("--"):
                return option + MASK
            if argument.startswith(f"{option}="):
                return f"{option}={MASK}"
        return None
