"""Requests to a rank by files in its spool: only its own user can make them, and they are checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddpdoctor.rundir import CAPTURE_ANSWER, CAPTURE_ORDER, STACKS_FILE, STACKS_QUESTION
from ddpdoctor.rundir.draining import discard
from ddpdoctor.rundir.requests import (
    CaptureRequest,
    answer_of,
    ask,
    capture_requested,
    delete_requests,
    new_request,
    present_ranks,
    request_capture,
    request_in,
)
from ddpdoctor.rundir.spool import Spool, make_spool_root

ORDER = CaptureRequest(request=7, number=1, first=100, steps=8)


@pytest.fixture
def spool(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    made = Spool(make_spool_root(str(run)), 3, str(run))
    yield made
    made.close()
    for name in os.listdir(made.directory):
        os.unlink(Path(made.directory, name))
    os.rmdir(made.directory)
    os.rmdir(os.path.dirname(made.directory))


def test_whoever_is_asked_need_not_look_twice(spool):
    def calm():
        """As if nothing had happened here for long."""
        os.utime(spool.directory, (1e9, 1e9))
        assert spool.directory_changed()
        assert not spool.directory_changed()

    for change in (
        lambda: request_capture(spool.directory, ORDER),
        lambda: request_capture(spool.directory, ORDER._replace(request=8)),
        lambda: delete_requests(spool.directory, 8, CAPTURE_ORDER),
        lambda: ask(spool.directory, 1, STACKS_QUESTION),
    ):
        calm()
        change()
        assert spool.directory_changed()
        # What comes in the same tick of the clock as that look cannot be seen by it.
        assert spool.directory_changed()


def test_an_order_arrives_and_is_taken_back(spool):
    assert capture_requested(spool.directory) is None
    request_capture(spool.directory, ORDER)
    assert capture_requested(spool.directory) == ORDER
    delete_requests(spool.directory, ORDER.request + 1, CAPTURE_ORDER)
    assert capture_requested(spool.directory) == ORDER  # somebody else's
    for _ in range(2):
        delete_requests(spool.directory, ORDER.request, CAPTURE_ORDER)
        assert capture_requested(spool.directory) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 0},
        {"steps": 65},
        {"steps": True},
        {"steps": 8.0},
        {"first": 0},
        {"first": -5},
        {"first": 1 << 60},
        {"first": "100"},
        {"number": 0},
        {"number": 21},
        {"request": 10**9},
        {"more": 1},
        {"request": None},
    ],
)
def test_what_is_no_order_is_none(spool, changed):
    written = json.dumps({**ORDER._asdict(), **changed})
    Path(spool.directory, CAPTURE_ORDER).write_text(written)
    assert capture_requested(spool.directory) is None


@pytest.mark.parametrize("content", ["", "[]", "7", "{", "\0" * 40, "[" * 400, " " * 600, '{"request": NaN}'])
def test_what_is_no_json_is_none(spool, content):
    Path(spool.directory, CAPTURE_ORDER).write_text(content)
    assert capture_requested(spool.directory) is None


def test_an_order_that_somebody_else_could_have_written_is_none(spool, tmp_path):
    place = Path(spool.directory, CAPTURE_ORDER)
    elsewhere = tmp_path / "planted"
    elsewhere.write_text(json.dumps(ORDER._asdict()))
    place.symlink_to(elsewhere)
    assert capture_requested(spool.directory) is None
    place.unlink()
    os.link(elsewhere, tmp_path / "second")
    request_capture(spool.directory, ORDER)
    os.chmod(spool.directory, 0o770)
    assert capture_requested(spool.directory) is None
    os.chmod(spool.directory, 0o700)
    os.link(place, Path(spool.directory, "second.tmp"))
    assert capture_requested(spool.directory) is None
    Path(spool.directory, "second.tmp").unlink()
    assert capture_requested(spool.directory) == ORDER


def test_a_pipe_is_not_waited_for(spool):
    os.mkfifo(Path(spool.directory, CAPTURE_ORDER))
    assert capture_requested(spool.directory) is None


def test_an_answer_is_of_its_question_alone(spool):
    request = new_request()
    ask(spool.directory, request, STACKS_QUESTION)
    assert request_in(spool.directory, STACKS_QUESTION) == request and request_in(spool.directory) == 0
    spool.keep_document(STACKS_FILE, {"request": request - 1})
    assert answer_of(spool.directory, STACKS_FILE, request) is None
    spool.keep_document(STACKS_FILE, {"request": request, "step": 4})
    assert answer_of(spool.directory, STACKS_FILE, request) == {"request": request, "step": 4}


def test_two_who_ask_at_once_both_have_the_answer(spool):
    """The second question replaces the first, and whoever is done first leaves what the other waits for."""
    first, second, since_ns = 11, 12, 1000
    ask(spool.directory, first, STACKS_QUESTION)
    ask(spool.directory, second, STACKS_QUESTION)
    spool.keep_document(STACKS_FILE, {"request": second, "at_ns": since_ns})
    assert answer_of(spool.directory, STACKS_FILE, first, since_ns) is not None
    assert answer_of(spool.directory, STACKS_FILE, first, since_ns + 1) is None  # of an earlier moment
    delete_requests(spool.directory, first, STACKS_QUESTION, STACKS_FILE)
    assert answer_of(spool.directory, STACKS_FILE, second) is not None
    assert request_in(spool.directory, STACKS_QUESTION) == second


def test_questions_go_with_the_spool(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    root = make_spool_root(str(run))
    made = Spool(root, 0, str(run))
    assert [(each.rank, each.pid) for each in present_ranks(str(run))] == [(0, os.getpid())]
    ask(made.directory, 5, STACKS_QUESTION)
    request_capture(made.directory, ORDER)
    for name in (STACKS_FILE, CAPTURE_ANSWER):
        made.keep_document(name, {})
    made.close()
    discard(made.directory)
    assert os.listdir(root) == []
    os.rmdir(root)
