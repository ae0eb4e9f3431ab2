"""CEL conditions over the facts: compiled once, evaluated over no more of the facts than they read."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any

_CORE = "cel.cel"
"""The compiled module that does the work; the rest of the package is its command line."""


def _core() -> Any:
    """The package's compiled module without the package's ``__init__``.

    That one imports a command line with prompt_toolkit and typer, which takes longer than all rules. The module
    goes by its own name into ``sys.modules``, because it may be initialised once only: a later ``import cel`` finds
    it there. Where a version has no such module, the package is imported as usual.
    """
    if "cel" in sys.modules or _CORE in sys.modules:
        return importlib.import_module(_CORE if _CORE in sys.modules else "cel")
    package = find_spec("cel")
    found = PathFinder.find_spec(_CORE, package.submodule_search_locations) if package is not None else None
    if found is None or found.loader is None:
        return importlib.import_module("cel")
    module = sys.modules[_CORE] = module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[_CORE]
        raise
    return module


_CEL = _core()


_TEXT = re.compile(r"""("{3}|'{3}).*?\1|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.DOTALL)
_PATH = re.compile(r"(?<![\w.\])])[A-Za-z_]\w*(?:\s*\.\s*[A-Za-z_]\w*)+(\s*\()?")


_BOUND = re.compile(r"\.\s*(?:all|exists|exists_one|map|filter)\s*\(\s*(\w+)\s*,")


_MACRO = re.compile(r"\.\s*(?:all|exists|exists_one|map|filter)\s*\Z")
_MAX_EXPRESSION = 4_000
"""Characters: the parser calls itself for each part of an expression, and the longest of the pack has 200."""
_MAX_MACRO_DEPTH = 2
"""Loops within loops: over all ranks, one more would take hours."""


def _check_size(expression: str) -> None:
    """ValueError where ``expression`` would take all stack or all time, which whoever parses or evaluates it does not
    notice."""
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"longer than {_MAX_EXPRESSION} characters")
    text, opened = _TEXT.sub('""', expression), [False]
    for bracket in re.finditer(r"[()]", text):
        if bracket[0] == "(":
            opened.append(_MACRO.search(text[: bracket.start()]) is not None)
        elif len(opened) > 1:
            opened.pop()
        if sum(opened) > _MAX_MACRO_DEPTH:
            raise ValueError(f"more than {_MAX_MACRO_DEPTH} of all, exists, map and filter within each other")


def paths_read(expression: str) -> list[str]:
    """The names that a CEL expression reads, dotted ones (``steps.mean_ms``) without methods called on them; not those
    that it binds itself. ValueError where it does not parse.
    """
    text = _TEXT.sub('""', expression)
    bound = set(_BOUND.findall(text))
    found = sorted(compiled(expression)[1] - bound)
    for match in _PATH.finditer(text):
        if re.split(r"[\s.]", match[0])[0] in bound:
            continue
        path = "".join(match[0].rstrip("( \t\r\n").split())
        found.append(path.rpartition(".")[0] if match[1] else path)
    return found


@functools.cache
def compiled(expression: str) -> tuple[Any, frozenset[str]]:
    """The program of a CEL expression, and the names that it may read; ValueError where it does not parse."""
    _check_size(expression)
    program = _CEL.compile(expression)
    return program, frozenset(program.variables())


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """Value of a CEL expression over ``names``.

    Only what it reads is handed over: each value is converted on every call. Raises what CEL raises, such as
    RuntimeError for a name that is not there, KeyError for a field, TypeError for operands that do not fit.
    """
    program, read = compiled(expression)
    return program.execute({name: value for name, value in names.items() if name in read})
