"""Compiled templates are kept between runs, and never used in place of what source and code say now."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from ddpdoctor.diagnose.rule_texts import _compile, _environment, render
from ddpdoctor.diagnose.template_cache import TemplateCache
from ddpdoctor.report.html import page_environment

TEXT = "rank {{ rank }} takes {{ cost | ms }}"
NAMES = {"rank": 1, "cost": 12.0, "job": {}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _compile.cache_clear()
    return tmp_path / "cache" / "ddpdoctor" / "templates"


def render_again(text: str = TEXT) -> str:
    """As a new process does."""
    _compile.cache_clear()
    return render(text, NAMES)


@pytest.fixture
def uncompilable(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(*_: object, **__: object) -> None:
        raise AssertionError("a template was compiled again")

    monkeypatch.setattr(jinja2.Environment, "compile", compile_)


def test_a_rules_text_is_compiled_once(folder, request):
    first = render_again()
    request.getfixturevalue("uncompilable")
    assert render_again() == first == "rank 1 takes 12 ms"
    assert len(list(folder.iterdir())) == 1
    with pytest.raises(AssertionError, match="compiled again"):
        render_again("another text {{ rank }}")


def test_the_reports_templates_are_compiled_once(folder, request):
    page_environment.cache_clear()
    names = [name for name in page_environment().list_templates() if name.endswith(".j2")]
    assert names
    for name in names:
        page_environment().get_template(name)
    page_environment.cache_clear()
    request.getfixturevalue("uncompilable")
    for name in names:
        page_environment().get_template(name)
    page_environment.cache_clear()


@pytest.mark.parametrize(
    "damage", [lambda sound: b"", lambda sound: sound[:-1], lambda sound: sound[:30] + b"x"]
)
def test_a_damaged_entry_is_made_again(folder, damage):
    render_again()
    (entry,) = folder.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(damage(sound))
    assert render_again() == "rank 1 takes 12 ms"
    assert entry.read_bytes() == sound


def test_what_others_can_write_is_not_run(folder):
    """A code object of another user would run with this user's rights."""
    render_again()
    (entry,) = folder.iterdir()
    entry.chmod(0o666)
    before = entry.stat().st_mtime_ns
    assert _environment().bytecode_cache._entry(bucket_of(TEXT)).read() is None
    folder.chmod(0o777)
    assert render_again() == "rank 1 takes 12 ms"
    assert entry.stat().st_mtime_ns == before  # neither read nor written


def bucket_of(source: str) -> jinja2.bccache.Bucket:
    return _environment().bytecode_cache.get_bucket(_environment(), "rule text", None, source)


def test_the_entry_depends_on_the_code_behind_it(folder):
    for files in ((), ("diagnose/rule_texts.py",), ("report/html.py",)):
        environment = jinja2.Environment(
            loader=jinja2.FunctionLoader(str), bytecode_cache=TemplateCache(*files)
        )
        assert environment.get_template("{{ 1 + 1 }}").render() == "2"
    assert len(list(folder.iterdir())) == 3


def test_without_a_folder_to_write_to_templates_are_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert render_again() == "rank 1 takes 12 ms"


def test_a_rules_text_includes_no_other_template():
    with pytest.raises(TypeError, match="no loader"):
        render_again("{% include 'rank' %}")


def test_a_rules_text_is_not_part_of_the_code():
    """Jinja writes a template's name into a message in its code."""
    assert render_again("{{ 'late' if rank }}\" + 'and {{ rank }}") == "late\" + 'and 1"
