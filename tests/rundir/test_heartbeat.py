"""The page in which a rank counts its steps: read from outside, whatever becomes of the spool."""

from __future__ import annotations

import os
import random
import shutil
import struct

import pytest

from ddpdoctor.rundir.heartbeat import (
    ENDS_AT,
    ENDS_MASK,
    HEARTBEAT_FILE,
    STEPS_AT,
    WRITTEN_AT,
    Heartbeat,
    HeartbeatReader,
    unwritten_steps,
)
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.launch.launched import make_run


def finish(heart: Heartbeat, steps: int, end_ns: int) -> None:
    """As the recorder counts a step."""
    heart.numbers[STEPS_AT + 1], heart.numbers[STEPS_AT] = end_ns, steps


def test_steps_are_read_also_when_the_spool_is_gone_and_after_the_end(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    spool = Spool(root, 3, str(run))
    reader = HeartbeatReader(spool.directory)
    assert reader.read() is None  # not made yet
    heart = Heartbeat(spool)
    first = reader.read()
    assert first is not None and (first.steps, first.in_order) == (0, False)
    finish(heart, 1, 1_000)
    shutil.rmtree(root)
    finish(heart, 2, 2_000)
    heart.report_written(100, 7)
    heart.report_written(50, 9)
    seen = reader.read()
    assert seen is not None and (seen.steps, seen.step_end_ns) == (2, 2_000)
    assert (seen.reports, seen.own_bytes, seen.own_faults) == (2, 150, 9)
    heart.end(2)
    ended = reader.read()
    assert ended is not None and ended.in_order
    finish(heart, 3, 3_000)  # a job that trains on after it destroyed its process group
    after = reader.read()
    assert after is not None and not after.in_order
    spool.close()
    with pytest.raises(ValueError, match="released"):
        finish(heart, 4, 4_000)
    heart.report_written(1, 1)
    assert HeartbeatReader(spool.directory).read() is None


def test_what_is_no_such_page_is_none(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    spool = Spool(root, 0, str(run))
    path = os.path.join(spool.directory, HEARTBEAT_FILE)
    for content in (b"", b"x" * 63, b"\xff" * 200):
        with open(path, "wb") as file:
            file.write(content)
        assert HeartbeatReader(spool.directory).read() is None
    shutil.rmtree(root)
    finish(Heartbeat(spool), 1, 1)  # nowhere to count: nothing is raised


def page(steps: int, written: int, ends: dict[int, int]) -> bytes:
    numbers = [0] * 512
    numbers[0], numbers[STEPS_AT], numbers[WRITTEN_AT] = 1, steps, written
    for number, end_ns in ends.items():
        numbers[ENDS_AT + (number & ENDS_MASK)] = end_ns
    return struct.pack("=512q", *numbers)


def test_steps_that_are_not_in_the_log_have_their_times_in_the_page() -> None:
    ends = {number: 1_000 * number for number in range(300, 311)}
    assert unwritten_steps(page(310, 308, ends), 0) == (308, [308_000, 309_000, 309_000, 310_000])
    assert unwritten_steps(page(310, 308, ends), 309) == (309, [309_000, 310_000])
    assert unwritten_steps(page(310, 310, ends), 310)[1] == []


@pytest.mark.parametrize(
    "damaged",
    [
        page(40, 0, {}),  # of a version that kept no times
        page(310, 308, {308: 2, 309: 1, 310: 3}),
        page(310, 308, {308: -2, 309: -1, 310: 3}),
        page(308, 310, {308: 1}),
        page(10**16, 10**16 - 2, {10**16 - 2: 1, 10**16 - 1: 2, 10**16: 3}),
        page(-3, -5, {}),
        page(310, 308, {308: 1, 309: 2, 310: 3})[:-1],
        b"",
        *(struct.pack("q", 1) + random.Random(seed).randbytes(4088) for seed in range(20)),
    ],
)
def test_a_damaged_page_has_no_steps(damaged: bytes) -> None:
    assert unwritten_steps(damaged, 0)[1] == []
