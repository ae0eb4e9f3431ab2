"""The backend of a job whose ``init_process_group`` was given none."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.hook.recording import REPOSITORY, forked, plain_environment

SCRIPT = """
import json
import torch.distributed as dist
from ddpdoctor.hook.job import process_groups

dist.init_process_group()
found = process_groups()
print(json.dumps([dist.get_backend(), found["backend"], found["process_groups"][0]["backend"]]))
dist.destroy_process_group()
"""


def test_a_backend_that_was_not_named_is_that_of_the_devices(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    done = subprocess.run(
        forked(tmp_path / "job.py", ranks=1),
        env=plain_environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    told, *recorded = json.loads(done.stdout.splitlines()[-1])
    assert told == "undefined"
    assert all("gloo" in each.split(":")[-1] and "undefined" not in each for each in recorded)
