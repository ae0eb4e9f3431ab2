"""Checked rules are kept between runs, found by content, and never in place of what the files say now."""

from __future__ import annotations

import stat
import typing
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.diagnose import load, rule_cache
from ddpdoctor.diagnose.load import load_rules, packaged_folder, read_folder
from ddpdoctor.diagnose.rule_cache import CachedResult
from ddpdoctor.errors import RuleError
from ddpdoctor.measure.facts import Facts

GOOD = (packaged_folder() / "gpu" / "memory-full.yaml").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ddpdoctor" / "rules"


def team(tmp_path: Path, text: str = GOOD) -> Path:
    file = tmp_path / "rules" / "gpu" / "memory-full.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return tmp_path / "rules"


def never(*_: object) -> None:
    raise AssertionError("a rule was checked again")


def test_the_second_reading_gives_the_same_rules_without_checking(monkeypatch):
    first = load_rules(entry_points=False)
    monkeypatch.setattr(load, "checked_rule", never)
    monkeypatch.setattr(load, "checked_common", never)
    second = load_rules(entry_points=False)
    assert second == first
    assert list(second.rules) == list(first.rules)


def test_a_changed_file_is_read_anew(tmp_path):
    folder = team(tmp_path)
    assert read_folder(folder)["gpu/memory-full"].severity == "info"
    team(tmp_path, GOOD.replace("severity: info", "severity: warning"))
    assert read_folder(folder)["gpu/memory-full"].severity == "warning"
    team(tmp_path)
    assert read_folder(folder)["gpu/memory-full"].severity == "info"


def test_a_rule_that_moves_is_checked_again(tmp_path):
    folder = team(tmp_path)
    read_folder(folder)
    (folder / "gpu").rename(folder / "cpu")
    with pytest.raises(RuleError, match="field `id`"):
        read_folder(folder)


def test_a_faulty_rule_is_refused_each_time(tmp_path, cache):
    folder = team(tmp_path, GOOD.replace("question:", "#"))
    for _ in range(2):
        with pytest.raises(RuleError, match="question"):
            read_folder(folder)
    assert not cache.exists()


@pytest.mark.parametrize("changed", ["version", "code", "package"])
def test_other_code_does_not_find_what_this_code_kept(tmp_path, cache, monkeypatch, changed):
    folder = team(tmp_path)
    read_folder(folder)
    rule_cache._code_hash.cache_clear()
    if changed == "version":
        monkeypatch.setattr("ddpdoctor.__version__", "0.0.test")
    elif changed == "code":
        monkeypatch.setattr(rule_cache, "_CODE_FILES", rule_cache._CODE_FILES[:-1])
    else:
        monkeypatch.setattr(rule_cache, "_package_versions", lambda: [b"another Jinja2"])
    read_folder(folder)
    rule_cache._code_hash.cache_clear()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda sound: b"", lambda sound: b"\x80", lambda sound: sound[:-1]])
def test_a_damaged_entry_is_made_again(tmp_path, cache, damage):
    folder = team(tmp_path)
    first = read_folder(folder)
    (entry,) = cache.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(damage(sound))
    assert read_folder(folder) == first
    assert entry.read_bytes() == sound


def test_an_entry_of_another_shape_is_made_again(cache):
    CachedResult(dict[str, str], {"a": b"content"}).write({"b": "c"})
    (entry,) = cache.iterdir()
    entry.rename(CachedResult(dict[str, int], {"a": b"content"})._entry)
    assert CachedResult(dict[str, int], {"a": b"content"}).read() is None


def test_what_the_format_would_change_is_not_kept(cache):
    for value in ({1, 2}, float("nan"), (1, 2)):
        CachedResult(dict, {"a": b"content"}).write({"test": value})
    assert not cache.exists()


def test_trouble_with_the_folder_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert list(read_folder(team(tmp_path))) == ["gpu/memory-full"]


def test_entries_are_the_users_own_and_few(tmp_path, cache):
    for number in range(rule_cache._MAX_ENTRIES + 5):
        CachedResult(dict[str, int], {"a": b"%d" % number}).write({"n": number})
    entries = list(cache.iterdir())
    assert len(entries) == rule_cache._MAX_ENTRIES
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in entries} == {0o600}
    assert CachedResult(dict[str, int], {"a": b"%d" % number}).read() == {"n": number}


def test_code_that_any_fact_comes_from_is_part_of_the_key():
    def modules(kind):
        yield kind.__module__
        for field in typing.get_type_hints(kind).values():
            for each in (
                field,
                *typing.get_args(field),
                *(b for a in typing.get_args(field) for b in typing.get_args(a)),
            ):
                if isinstance(each, type) and issubclass(each, msgspec.Struct):
                    yield from modules(each)

    found = {f"{name.removeprefix('ddpdoctor.').replace('.', '/')}.py" for name in modules(Facts)}
    assert "measure/runfacts.py" in found and found <= set(rule_cache._CODE_FILES)
