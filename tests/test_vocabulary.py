"""Checks that names, messages, docstrings, rules and documents contain no retired words. ``tests/words.toml`` lists them with
replacements. Part of ``make check``. The list ``allowed`` there has exceptions by file."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
import yaml

ROOT = Path(__file__).parent.parent
LISTS = tomllib.loads((ROOT / "tests" / "words.toml").read_text())
PROSE = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): instead for word, instead in LISTS["prose"].items()}
NAMES = LISTS["names"]
ALLOWED = LISTS["allowed"]
pytestmark = pytest.mark.extended

CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def prose_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, docstrings, and string constants that are sentences."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def texts_of_yaml(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("facts", "snippet", "when", "docs"):
                yield from texts_of_yaml(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of_yaml(inner)
    elif isinstance(value, str):
        yield value


def prose() -> Iterator[tuple[str, int, str]]:
    """(Path, line, text) of all texts for readers."""
    for path in sorted((ROOT / "ddpdoctor").rglob("*.py")):
        for line, text in prose_of_python(path):
            yield str(path.relative_to(ROOT)), line, text
    for path in sorted((ROOT / "rules").rglob("*.yaml")):
        for text in texts_of_yaml(yaml.safe_load(path.read_text())):
            yield str(path.relative_to(ROOT)), 0, text
    for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        without_code = CODE.sub(lambda found: "\n" * found[0].count("\n"), path.read_text())
        for line, text in enumerate(without_code.splitlines(), 1):
            yield str(path.relative_to(ROOT)), line, text


def retired_in_prose() -> list[str]:
    found = []
    for path, line, text in prose():
        for pattern, instead in PROSE.items():
            for match in pattern.finditer(CODE.sub("", text)):
                if match[0].lower() not in ALLOWED.get(path, {}):
                    found.append(f"{path}:{line}: {match[0]!r}: write {instead}")
    return found


def retired_names() -> list[str]:
    found = []
    for path in sorted((ROOT / "ddpdoctor").rglob("*.py")):
        place = str(path.relative_to(ROOT))
        names = {(1, path.stem)}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add((node.lineno, node.name))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add((node.lineno, node.id))
            elif isinstance(node, ast.arg):
                names.add((node.lineno, node.arg))
        for line, name in sorted(names):
            for word in re.findall(r"[a-z]+|[A-Z][a-z]*", name):
                if word.lower() in NAMES and word.lower() not in ALLOWED.get(place, {}):
                    found.append(f"{place}:{line}: {name}: write {NAMES[word.lower()]}")
    return found


@pytest.mark.parametrize("look", [retired_in_prose, retired_names])
def test_no_retired_word_is_used(look) -> None:
    found = look()
    assert not found, f"{len(found)} in all:\n" + "\n".join(found[:40])


def test_the_types_in_the_glossary_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    glossary = page[page.index("## Words") : page.index("## How a rank is recorded")]
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", glossary))
    defined = {
        node.name
        for path in (ROOT / "ddpdoctor").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert named and named <= defined, named - defined
