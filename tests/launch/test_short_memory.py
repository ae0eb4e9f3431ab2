"""Memory of the recording that the job fills, or that somebody removes while it runs, with real ranks and a real /dev/shm of their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.hook.recording import Recorded, torchrun

from .launched import DDPDOCTOR_RUN, clean_environment, ended_well, two_ranks_took

pytestmark = [pytest.mark.torchrun, pytest.mark.extended]
STEPS = 1500
"""More than fit into one segment."""
OWN_SHM = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"', "sh"]
FILLED = 'head -c 58M /dev/zero > /dev/shm/of-the-job; exec "$@"'
AT_STEP_60 = """
(until grep -q '"step":60,' run/ranks/00000/steps.jsonl; do sleep 0.1; done; {act}; touch acted) 2>/dev/null &
exec "$@"
"""
REMOVED = AT_STEP_60.format(act="rm -rf /dev/shm/ddpdoctor-*")
FILLED_LATER = AT_STEP_60.format(act="cat /dev/zero > /dev/shm/of-the-job || true")


def may_mount() -> bool:
    try:
        return subprocess.run([*OWN_SHM, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture(autouse=True)
def needs_mounts() -> None:
    if not may_mount():
        pytest.skip("no file system may be mounted here")


def recorded_while(happens: str, folder: Path, steps: int) -> Recorded:
    job = torchrun("tiny_ddp.py", "--steps", str(steps), "--step-ms", "2")
    command = [*OWN_SHM, *DDPDOCTOR_RUN, "--out", "run", "--", "sh", "-ec", happens, "sh", *job]
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=180, check=False
    )
    return Recorded(done, folder / "run")


def test_every_step_is_recorded_in_little_memory(tmp_path):
    """The job has filled 58 of docker's 64 MB: records pass through the rest."""
    recorded = recorded_while(FILLED, tmp_path, STEPS)
    two_ranks_took(recorded, STEPS)
    assert [line for rank in (0, 1) for line in recorded.lines(rank) if line.get("note")] == []


def test_spools_that_were_removed_are_made_again(tmp_path):
    """Somebody removes the spools while the job runs, as systemd does at a logout. Where a rank writes in that moment, it may cost a
    few steps, which are named."""
    recorded = recorded_while(REMOVED, tmp_path, STEPS)
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert (tmp_path / "acted").exists() and recorded.folders() == ["00000", "00001"]
    for rank in (0, 1):
        assert len(named_steps(recorded, rank)) < 0.03 * STEPS
    ended_well(recorded.run)


def test_steps_for_which_there_was_no_room_are_named_with_what_to_do(tmp_path):
    """The job takes the last byte; the one file that says what is missing has room of its own."""
    recorded = recorded_while(FILLED_LATER, tmp_path, STEPS)
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert (tmp_path / "acted").exists()
    for rank in (0, 1):
        assert any("--shm-size" in error for error in recorded.info(rank)["hook"]["errors"])
        assert named_steps(recorded, rank)


def named_steps(recorded: Recorded, rank: int) -> set[int]:
    """The steps that the rank says were not recorded; all others are."""
    named: set[int] = set()
    for error in recorded.info(rank)["hook"]["errors"]:
        steps, told, _ = error.partition(" were not recorded: ")
        if told:
            named |= {
                int(number) for pair in re.findall(r"(\d+)(?: to (\d+))?", steps) for number in span(pair)
            }
    found = {step["step"] for step in recorded.steps(rank)}
    assert found | named == set(range(STEPS)) and not found & named
    return named


def span(pair: tuple[str, str]) -> range:
    return range(int(pair[0]), int(pair[1] or pair[0]) + 1)
