"""Ranks in a pid namespace of their own, where process ids mean something else: their recording is neither cut off nor left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .launched import TINY, run_under, spools_below, two_ranks_took

pytestmark = [pytest.mark.torchrun, pytest.mark.extended, pytest.mark.usefixtures("no_spool_stays")]

STEPS = 60
UNSHARED = ["unshare", "--pid", "--fork", "--mount-proc"]
NUMBERED = 'echo {number} > /proc/sys/kernel/ns_last_pid && exec "$@"'
"""The first process id that ranks get inside: one that the host does not have, or one that it has."""


def may_unshare() -> bool:
    command = [*UNSHARED, "sh", "-c", NUMBERED.format(number=2000), "sh", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("number", [3_900_000, 1])
def test_ranks_in_another_pid_namespace_are_recorded_whole(tmp_path, number):
    if not may_unshare():
        pytest.skip("no pid namespace may be made here")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = [*torchrun, TINY, "--steps", str(STEPS), "--step-ms", "50"]
    recorded = run_under(tmp_path, [*UNSHARED, "sh", "-c", NUMBERED.format(number=number), "sh", *job])
    two_ranks_took(recorded, STEPS)
    assert not spools_below(tmp_path), "nothing stays in memory"
