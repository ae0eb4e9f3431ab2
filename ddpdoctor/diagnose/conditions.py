"""Compiles and evaluates the rules' CEL conditions. Only the facts that a condition reads are passed to CEL."""

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
"""The compiled evaluator; the rest of the package is its command line."""


def _core() -> Any:
    """The package's compiled module, imported without the package's ``__init__``.

    ``__init__`` imports a command line with prompt_toolkit and typer, which takes longer than evaluating all rules. The
    module is registered in ``sys.modules`` under its own name, because it can be initialised only once: a later
    ``import cel`` finds it. If a version has no such module, the package is imported as usual.
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
"""Characters. The parser is recursive; the longest expression of the rule pack has 200."""
_MAX_MACRO_DEPTH = 2
"""Nested loops. With three, a condition over all ranks would take hours."""


def _check_size(expression: str) -> None:
    """Raises ValueError if ``expression`` could exhaust the stack or run for hours; CEL itself has no such limits."""
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
    """The names that a CEL expression reads, except loop variables. Dotted names (``steps.mean_ms``) are without methods called on them.
    Raises ValueError if the expression does not parse."""
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
    """The program of a CEL expression and its free names. Raises ValueError if it does not parse."""
    _check_size(expression)
    program = _CEL.compile(expression)
    return program, frozenset(program.variables())


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """Value of a CEL expression over ``names``.

    Passes only the names that it reads, because CEL converts each value on every call. Raises CEL's errors, such as
    RuntimeError for an unknown name, KeyError for an unknown field, TypeError for operands of wrong types.
    """
    program, read = compiled(expression)
    return program.execute({name: value for name, value in names.items() if name in read})
