"""Every number that decides something says where it comes from: a line of reason, or a citation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MEASURE = Path(__file__).parents[2] / "ddpdoctor" / "measure"


def bare_numbers(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of constants and tuning fields with a number in them and no docstring behind them."""
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if _is_tuning(node))]
    for body in bodies:
        for place, node in enumerate(body):
            name = _constant(node)
            if name and _has_number(node) and not _is_text(body[place + 1 : place + 2]):
                yield node.lineno, name


def _is_tuning(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "Tuning" in node.name


def _constant(node: ast.stmt) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    if not isinstance(target, ast.Name) or not isinstance(node, ast.Assign | ast.AnnAssign):
        return None
    return target.id if target.id.isupper() or isinstance(node, ast.AnnAssign) else None


def _has_number(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    while isinstance(value, ast.UnaryOp):
        value = value.operand
    if isinstance(value, ast.BinOp):
        return _has_number(ast.Assign([], value.left)) and _has_number(ast.Assign([], value.right))
    if isinstance(value, ast.Tuple | ast.List):
        return any(_has_number(ast.Assign([], entry)) for entry in value.elts)
    return (
        isinstance(value, ast.Constant)
        and isinstance(value.value, int | float)
        and not isinstance(value.value, bool)
    )


def _is_text(following: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in following
    )


def test_every_number_says_where_it_comes_from():
    bare = [
        f"{file.relative_to(MEASURE)}:{line}: {name}"
        for file in sorted(MEASURE.rglob("*.py"))
        for line, name in bare_numbers(file.read_text(encoding="utf-8"))
    ]
    assert bare == []


def test_a_bare_number_is_found():
    source = 'A = 1\n"""Why."""\nB = 2 * 1024\nC: float = -0.5\nD = (1, 2)\nE = "text"\nF = True\n'
    assert [name for _, name in bare_numbers(source)] == ["B", "C", "D"]
    tuning = 'class _Tuning:\n    a: int = 1\n    """Why."""\n    b: int = 2\n'
    assert [name for _, name in bare_numbers(tuning)] == ["b"]
