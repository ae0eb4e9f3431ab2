"""A job that makes one process group after another, of other sizes: each is a session, and none is kept once it has ended."""

from __future__ import annotations

import pytest

from tests.hook.recording import forked, run_recorded

pytestmark = pytest.mark.torchrun
JOB = """
import os, sys
import torch.distributed as dist

rank, both = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
for turn in range(3):
    size = both if turn % 2 else 1
    place = dist.PrefixStore(f"{turn} {rank if size == 1 else ''}", store)
    dist.init_process_group("gloo", store=place, rank=rank if size > 1 else 0, world_size=size)
    dist.barrier()
    dist.destroy_process_group()
window = sys.modules["_ddpdoctor.hook.profiling.window"]
other = sys.modules["_ddpdoctor.hook.profiling.window"]
print(len(window.windows))
"""


def test_a_session_that_has_ended_is_not_kept(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    recorded = run_recorded(tmp_path, forked(tmp_path / "job.py"))
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.process.stdout.splitlines() == ["1", "1"]
    assert len(list((recorded.run / "ranks").iterdir())) == 6
