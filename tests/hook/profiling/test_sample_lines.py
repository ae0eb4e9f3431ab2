"""Definitions of source lines in samples.jsonl."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.job import CodeKinds
from ddpdoctor.hook.profiling import Sampler
from ddpdoctor.rundir import SAMPLES_FILE
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.spool import Spool, make_spool_root

LINES = 15_000


@pytest.fixture
def often():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_no_definition_is_lost_while_the_training_thread_writes(tmp_path, often) -> None:
    spool = Spool(make_spool_root(str(tmp_path)), 0, str(tmp_path))
    sampler = Sampler(SimpleNamespace(recorder=SimpleNamespace(kinds=CodeKinds()), rank=0, spool=spool))
    code = compile("", "train.py", "exec")
    thread = threading.Thread(target=lambda: [sampler._lines.id_of(code, line) for line in range(LINES)])
    thread.start()
    while thread.is_alive():
        sampler.write_out()
    sampler.write_out()
    text = (Path(drain(spool.directory)) / SAMPLES_FILE).read_text()
    spool.close()
    drain(spool.directory, remove=True)
    assert [json.loads(line)["where"] for line in text.splitlines()] == list(range(LINES))
