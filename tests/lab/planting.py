"""Faults as text: what is written into a script, where, and which lines the diagnosis must then name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"
HERE = "  # here"
"""Ends each line that is a right answer to the question where the time goes."""
_SLOT = re.compile(r"^(?P<indent> *)# slot: (?P<name>\w+)(?: rank=(?P<rank>\S+))?(?: var=(?P<var>\S+))?$")


@dataclass(frozen=True)
class Plant:
    """One change of a script. ``{rank}`` and ``{var}`` in code stand for the slot's own words for them."""

    code: dict[str, str] = field(default_factory=dict)
    """Slot → the lines written there."""
    swaps: tuple[tuple[str, str], ...] = ()
    """Text to replace, which must be in the script."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    here: str | None = None
    """A comment of the script itself that marks its line as a right answer, such as ``# the loader``."""


def slots(script: str) -> set[str]:
    """Names of the places in a script where code can be written."""
    lines = (JOBS / f"{script}.py").read_text().splitlines()
    return {found["name"] for found in map(_SLOT.match, lines) if found}


def written(script: str, plants: list[Plant]) -> str:
    """The script's text with the plants in it. Raises KeyError where it lacks a slot, ValueError where it lacks a text."""
    text = (JOBS / f"{script}.py").read_text()
    for plant in plants:
        if missing := plant.code.keys() - slots(script):
            raise KeyError(f"{script}.py has no slot {', '.join(sorted(missing))}")
        for old, new in plant.swaps:
            if old not in text:
                raise ValueError(f"{script}.py does not contain {old!r}")
            text = text.replace(old, new)
    lines: list[str] = []
    for line in text.splitlines():
        found = _SLOT.match(line)
        if not found:
            lines.append(line)
            continue
        for plant in plants:
            code = plant.code.get(found["name"], "")
            code = code.replace("{rank}", found["rank"] or "").replace("{var}", found["var"] or "")
            lines += [found["indent"] + part for part in code.splitlines()]
    return "\n".join(lines) + "\n"


def right_lines(text: str, here: str | None = None) -> set[int]:
    """Line numbers, from 1, that end in :data:`HERE` or contain the script's own mark."""
    marks = [HERE.strip()] + ([here] if here else [])
    return {n for n, line in enumerate(text.splitlines(), 1) if any(mark in line for mark in marks)}


def function_of(text: str, line: int) -> str | None:
    """Name of the innermost function around a line; None at module level."""
    import ast

    best: tuple[int, str] | None = None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or node.lineno):
            best = max(best or (0, ""), (node.lineno, node.name))
    return best[1] if best else None
