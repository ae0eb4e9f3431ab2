"""Makes a unified diff of the user's file that changes a setting. The diff is not applied here.

Only unambiguous edits are made: the constructor is called at the recorded line (or only once in the script), and the argument is a literal
keyword argument there, or is missing and can be added. The patched text must parse, and its call must have the value.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from typing import Any

from ddpdoctor.rundir.sources import parsed_python

_KINDS = {"loader": ("DataLoader",), "ddp": ("DistributedDataParallel", "DDP")}
_ARGUMENTS = {
    "loader": ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"),
    "ddp": (
        "bucket_cap_mb",
        "gradient_as_bucket_view",
        "static_graph",
        "find_unused_parameters",
        "broadcast_buffers",
    ),
}
_BY_PLACE = {"loader": 5, "ddp": 4}
"""Number of positional parameters before the first one that can be set. A call with more positional arguments may set that one."""


def patch_of(text: str, path: str, line: int | None, settings: Mapping[str, Any]) -> str | None:
    """The diff that sets ``settings`` in the constructor call at ``line`` of ``text`` (None: the only call). None if it is ambiguous or
    changes nothing."""
    kinds = {name.partition(".")[0] for name in settings}
    if len(kinds) != 1 or (kind := kinds.pop()) not in _KINDS:
        return None
    arguments = {name.partition(".")[2]: value for name, value in settings.items()}
    if not set(arguments) <= set(_ARGUMENTS[kind]):
        return None
    changed = text
    for argument, value in arguments.items():
        call = _call(changed, line, kind)
        edited = (
            None
            if call is None or len(call.args) > _BY_PLACE[kind]
            else _edited(changed, call, argument, value)
        )
        if edited is None:
            return None
        changed = edited
    call = _call(changed, line, kind)
    if changed == text or call is None or not _holds(call, arguments):
        return None
    diff = difflib.unified_diff(_lines(text), _lines(changed), f"a/{path}", f"b/{path}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff
    )


def _lines(text: str) -> list[str]:
    """Lines with their line ends, as Python and patch(1) count them: a form feed does not end a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _call(text: str, line: int | None, kind: str) -> ast.Call | None:
    """The call of such a constructor that spans ``line``, or any such call if ``line`` is None; None unless there is exactly one."""
    tree = parsed_python(text)
    if tree is None:
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and _name(node.func) in _KINDS[kind]
        and (line is None or node.lineno <= line <= (node.end_lineno or node.lineno))
    ]
    return found[0] if len(found) == 1 else None


def _name(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _edited(text: str, call: ast.Call, argument: str, value: Any) -> str | None:
    given = [keyword for keyword in call.keywords if keyword.arg == argument]
    lines = _lines(text)
    if given:
        node = given[0].value
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
        if not isinstance(node, ast.Constant) and not negative:
            return None
        return _replaced(lines, node, repr(value))
    if any(keyword.arg is None for keyword in call.keywords):
        return None  # **options may contain it
    last = max(
        [*call.args, *(keyword.value for keyword in call.keywords)],
        key=lambda each: (each.end_lineno, each.end_col_offset),
        default=None,
    )
    if last is None or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    row, column = (
        (last.end_lineno or 1) - 1,
        _column(lines[(last.end_lineno or 1) - 1], last.end_col_offset or 0),
    )
    lines[row] = f"{lines[row][:column]}, {argument}={value!r}{lines[row][column:]}"
    return "".join(lines)


def _replaced(lines: list[str], node: ast.expr, new: str) -> str | None:
    if node.lineno != node.end_lineno:
        return None
    row = node.lineno - 1
    begin, end = _column(lines[row], node.col_offset), _column(lines[row], node.end_col_offset or 0)
    lines[row] = lines[row][:begin] + new + lines[row][end:]
    return "".join(lines)


def _column(line: str, utf8: int) -> int:
    """Column in characters of a column in UTF-8 bytes, the unit of ast."""
    return len(line.encode()[:utf8].decode("utf-8", "ignore"))


def _holds(call: ast.Call, arguments: Mapping[str, Any]) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    for name, value in arguments.items():
        node = given.get(name)
        try:
            if node is None or ast.literal_eval(node) != value:
                return False
        except ValueError:
            return False
    return True
