"""A command line without secrets: what may be written down of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddpdoctor.rundir.privacy import MASK, mask_text, names_secret

_ASSIGNMENT = re.compile(r"([\w.+-]*[A-Za-z][\w.+-]*)=(.+)", re.DOTALL)


def mask_command(command: Iterable[str]) -> list[str]:
    """The command line with passwords, tokens and what looks like one replaced by ``***``; as many arguments
    as before.
    """
    masked: list[str] = []
    value_is_secret = False
    for argument in command:
        if value_is_secret and not argument.startswith("-"):
            masked.append(MASK)
            value_is_secret = False
            continue
        value_is_secret = argument.startswith("-") and "=" not in argument and names_secret(argument)
        masked.append(_mask_argument(argument))
    return masked


def _mask_argument(argument: str) -> str:
    if any(space in argument for space in " \t\n"):
        # A command line within an argument: sh -c "export TOKEN=... ; python train.py --api-key ..."
        text = mask_text(argument)
        parts = re.split(r"(\s+)", text)
        parts[::2] = mask_command(parts[::2])
        return "".join(parts)
    assigned = _ASSIGNMENT.fullmatch(argument)
    if assigned and names_secret(assigned.group(1)):
        return f"{assigned.group(1)}={MASK}"
    return mask_text(argument)
