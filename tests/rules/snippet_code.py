"""What a snippet of a fix is and needs: Python, Python for a GPU, or shell; and the names that it takes from the script."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from typing import Literal

IMPORTS = {
    *("torch", "dist", "F", "DataLoader", "DistributedSampler", "DistributedDataParallel"),
    *("collections", "contextlib", "functools", "gc", "itertools", "numpy", "os", "sys", "time"),
    *("timedelta", "tracemalloc"),
}
"""What snippets use without importing it, as nearly every training script has."""


def snippet_kind(text: str) -> Literal["python", "gpu", "shell"]:
    """Whether a snippet is Python that any machine can run, Python that needs a GPU, or for a shell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = ast.unparse(ast.parse(text))
    except SyntaxError:
        return "shell"
    return "gpu" if re.search(r"cuda|nccl|device_ids=|bf16_compress", code, re.IGNORECASE) else "python"


def names_taken(text: str) -> list[str]:
    """Names that a Python snippet takes from the script where it is pasted, besides :data:`IMPORTS`; raises SyntaxError."""
    taken: set[str] = set()
    made = IMPORTS | set(dir(builtins))
    for statement in ast.parse(text).body:
        read, bound = _names_of(statement)
        # An assignment may read what it assigns; in a block or a function, what it binds is its own.
        taken |= read - made - (set() if isinstance(statement, ast.Assign | ast.AugAssign) else bound)
        made |= bound
    return sorted(taken)


def _names_of(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a statement reads, and those that it binds."""
    read: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (bound if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    if isinstance(statement, ast.AugAssign):
        read |= bound
    for node in ast.walk(statement):
        if isinstance(node, ast.comprehension):
            read -= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
    return read, bound
