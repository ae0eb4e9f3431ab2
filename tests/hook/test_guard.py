"""What an error says goes into rank.json without what its text may hold."""

from __future__ import annotations

from typing import Never

import pytest

from ddpdoctor.hook import guard, install
from ddpdoctor.hook.patches import PARTS


@pytest.fixture(autouse=True)
def fresh():
    guard.reset()
    yield
    guard.reset()


def test_an_errors_text_is_masked_where_it_is_kept_and_where_it_is_told(capsys):
    guard.part("a part of this test").failed(ValueError("GET https://me:hunter2@host/x?sig=hunter2 failed"))
    told = capsys.readouterr().err
    assert guard.errors == ["a part of this test: ValueError: GET https://***@host/x?sig=*** failed"]
    assert "https://***@host" in told and "hunter2" not in told


def test_an_error_that_cannot_be_worded_is_counted_all_the_same():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    guard.part("a part of this test").failed(Mute())
    assert guard.errors == ["a part of this test: Mute"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_cannot_be_installed_is_told_by_its_name(part, monkeypatch, capsys):
    def lacking(name: str, package: str | None = None) -> Never:
        raise ImportError("planted")

    monkeypatch.setattr(install, "PARTS", (part,))
    monkeypatch.setattr(install, "TRIAL", "no variable of this name")
    monkeypatch.setattr(install.finder, "after_import", lambda *given: None)
    real = install.importlib.import_module
    monkeypatch.setattr(
        install.importlib,
        "import_module",
        lambda name, package: (lacking if "patches" in name else real)(name, package),
    )
    install.install()
    told = capsys.readouterr().err
    assert "ImportError: planted" in told
    assert "." not in guard.errors[0].partition(":")[0] and "install" not in told.partition("(")[0]
