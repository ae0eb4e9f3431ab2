"""References in the documents exist: linked files and headings, commands and their options, make targets."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import click
import tomllib

from ddpdoctor.cli.main import VERBS, cli

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
COMMAND = re.compile(r"\bddpdoctor (?!import )([a-z]+)\b([^\n`#|]*)")
TARGET = re.compile(r"\bmake ([a-z-]+)\b")


@cache
def heading_anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def code_of(page: Path) -> list[str]:
    return CODE.findall(page.read_text(encoding="utf-8"))


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.-]+/[\w.-]+\.py)`", text)) - {"formats/spans/__init__.py"}
    package = ROOT / "ddpdoctor"
    roots = (ROOT, package, package / "measure", package / "trace", package / "diagnose")
    roots += (package / "trace" / "formats",)
    folders = set(re.findall(r"`([\w/]+)/`", text))
    assert len(named) > 30 and len(folders) > 30
    assert [name for name in sorted(folders) if not any((root / name).is_dir() for root in roots)] == []
    assert [name for name in sorted(named) if not any((root / name).is_file() for root in roots)] == []


@cache
def option_names(verb: str) -> set[str]:
    """Options of a command and of its subcommands."""
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    commands = [command, *getattr(command, "commands", {}).values()]
    found = {
        name for each in commands for option in each.params for name in (*option.opts, *option.secondary_opts)
    }
    return found | {"-h", "--help"}


def test_targets_of_links_exist():
    broken = []
    for page in PAGES:
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        for link in LINK.findall(text):
            if "://" in link or link.startswith("mailto:"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in heading_anchors(target)):
                broken.append((page.name, link))
    assert broken == []


def test_commands_and_options_exist():
    unknown = []
    for code in (code for page in PAGES for code in code_of(page)):
        for verb, rest in COMMAND.findall(code):
            if verb not in VERBS:
                unknown.append(verb)
                continue
            # Options after the double dash are the job's.
            words = re.split(r" -- ", f" {rest} ", maxsplit=1)[0].split()
            given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
            unknown += [f"{verb} {option}" for option in given if option not in option_names(verb)]
    assert unknown == []


def test_make_targets_exist():
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "check", "bench", "exam", "clean"} <= known
    named = {name for page in PAGES for code in code_of(page) for name in TARGET.findall(code)}
    assert named - known == set()


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert f"({oldest.replace('.', ', ')})" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_all_development_dependencies_are_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain_name(line.partition("==")[0]) for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {plain_name(name) for name in [*project["dependencies"], *extras["torch"], *extras["dev"]]}
    assert wanted - pinned == set()


def plain_name(requirement: str) -> str:
    """The name of a distribution, normalised like on PyPI, without version."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!\[; ]", requirement)[0]).lower()
