"""What an error says goes into rank.json without what its text may hold."""

from __future__ import annotations

import pytest

from ddpdoctor.hook import guard


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
