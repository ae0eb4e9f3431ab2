"""Jobs of real ranks that stop, each in its own way, and the verdict on each: the rule, the rank, the line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from tests.hook.recording import JOBS, TORCHRUN, forked
from tests.waiting import until

from .launched import DDPDOCTOR_RUN, clean_environment, run_under, running
from .test_hangs import AFTER
from .test_hosts import started
from .two_hosts import two_hosts, why_not
from .watched import stalls

DISAGREEING, STOPPING = str(JOBS / "disagreeing_ddp.py"), str(JOBS / "stopping_ddp.py")
SLOW = pytest.mark.slow


def verdict_on(run: Path | list[Path]) -> tuple[Diagnosis, Finding]:
    diagnosis = analyze([str(path) for path in run] if isinstance(run, list) else [str(run)])
    assert diagnosis.findings, diagnosis.verdict
    assert diagnosis.findings[0].rule == diagnosis.verdict.rule
    return diagnosis, diagnosis.findings[0]


def stopped(tmp: Path, job: str, how: str, ranks: int, *more: str) -> tuple[Diagnosis, Finding]:
    command = forked(job, "--how", how, *more, ranks=ranks)
    recorded = run_under(tmp, command, *AFTER, "--on-hang", "kill")
    assert recorded.process.returncode != 0, recorded.process.stderr
    return verdict_on(recorded.run)


def at(finding: Finding) -> list[str]:
    """Functions at which it points."""
    return [where.function for where in finding.where]


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize(
    "how",
    [
        "other_shape",
        pytest.param("other_order", marks=SLOW),
        pytest.param("other_operation", marks=SLOW),
        pytest.param("one_more", marks=SLOW),
        pytest.param("other_type", marks=SLOW),
        pytest.param("one_less", marks=SLOW),
    ],
)
def test_ranks_that_call_what_does_not_go_together(tmp_path, how: str, ranks: int) -> None:
    """Whether Gloo ends one of them, raises, or lets them wait for ever."""
    diagnosis, finding = stopped(tmp_path, DISAGREEING, how, ranks)
    assert (finding.rule, finding.ranks) == ("hang/different-collectives", [1]), diagnosis.facts["hang"]
    assert set(at(finding)) <= {how, "large", "usual"}, at(finding)
    assert diagnosis.facts["hang"]["different"]["waits_at"]


@pytest.mark.torchrun
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize(
    ("how", "more", "kind", "where", "waits"),
    [
        ("left_early", (), "lacking", "main", "evaluation"),
        pytest.param("left_early", ("--buffers",), "lacking", "main", "evaluation", marks=SLOW),
        pytest.param("buffers_left_out", ("--buffers",), "lacking", "main", "main", marks=SLOW),
        pytest.param("evaluated_twice", (), "extra", "evaluation", "main", marks=SLOW),
        pytest.param("barrier_instead", (), "operation", "barrier_instead", "evaluation", marks=SLOW),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_a_rank_that_leaves_the_order_of_evaluations(tmp_path, how, more, kind, where, waits, ranks) -> None:
    """Against what DDP issues itself, its reduction in a backward pass and its broadcast of buffers: the rank that waits, and that
    Gloo aborts, is not at fault."""
    diagnosis, finding = stopped(tmp_path, DISAGREEING, how, ranks, "--every", "10", *more)
    different = diagnosis.facts["hang"]["different"]
    assert (finding.rule, finding.ranks) == ("hang/different-collectives", [1]), diagnosis.facts["hang"]
    assert (different["kind"], at(finding)) == (kind, [where]), diagnosis.verdict.headline
    assert [place["function"] for place in different["waits_at"]] == [waits]


@pytest.mark.torchrun
@SLOW
def test_of_two_ranks_both_are_named_where_no_evaluation_before_shows_who_left(tmp_path) -> None:
    """The second evaluation: nothing says that it was due."""
    more = ("--every", "10", "--at", "10")
    diagnosis, finding = stopped(tmp_path, DISAGREEING, "left_early", 2, *more)
    assert (finding.rule, finding.ranks) == ("hang/different-collectives", [0, 1]), diagnosis.facts["hang"]
    assert sorted(at(finding)) == ["evaluation", "main"]


@pytest.mark.torchrun
@SLOW
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ("asleep_in_a_lock", "hang/not-reached"),
        ("in_c_with_the_lock", "hang/not-reached"),
        ("extra_barrier", "hang/different-collectives"),
        ("killed", "hang/rank-died"),
        ("segfault", "hang/rank-died"),
        ("raising", "hang/rank-raised"),
        ("worker_killed", "hang/loader-worker-killed"),
    ],
)
def test_the_rank_and_the_line(tmp_path, how: str, rule: str, ranks: int) -> None:
    diagnosis, finding = stopped(tmp_path, STOPPING, how, ranks)
    assert (finding.rule, finding.ranks) == (rule, [1]), diagnosis.facts["hang"]
    if how != "killed":  # of which only the last look knows where it was
        assert how in at(finding), finding.where


@pytest.mark.torchrun
@SLOW
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loop_is_told_while_it_lasts_and_spared(tmp_path, ranks: int) -> None:
    """It looks like a long computation, so that --on-hang kill does not end it, and the user does."""
    job = forked(STOPPING, "--how", "in_a_loop", ranks=ranks)
    with running(tmp_path, job, *AFTER, "--on-hang", "kill") as launcher:
        until(lambda: stalls(tmp_path / "run"), launcher)
        diagnosis, finding = verdict_on(tmp_path / "run")
        assert (finding.rule, finding.ranks) == ("hang/not-reached", [1]), diagnosis.facts["hang"]
        assert "in_a_loop" in at(finding) and diagnosis.verdict.headline.startswith(
            "The job seems to hang: rank 1 keeps computing at "
        )
        time.sleep(10)  # in which another would be ended
        os.killpg(launcher.pid, signal.SIGTERM)
        _, err = launcher.communicate(timeout=60)
    assert "the job is not ended: rank 1 uses a processor" in err and "is ended, as" not in err
    headline = verdict_on(tmp_path / "run")[0].verdict.headline
    assert (
        headline.startswith("The job hung for ") and " until SIGTERM ended it; last seen: rank 1 " in headline
    )


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=SLOW), 2])
def test_a_rank_that_does_not_join(tmp_path, ranks: int) -> None:
    diagnosis, finding = stopped(tmp_path, STOPPING, "before_joining", ranks)
    assert (finding.rule, finding.ranks, at(finding)) == ("hang/not-reached", [1], ["before_joining"])
    assert "has not called init_process_group" in diagnosis.verdict.headline


@contextlib.contextmanager
def frozen_storage(folder: Path) -> Iterator[Path]:
    """A file system that does not answer whoever writes, from now on; skips the test where there can't be one."""
    image, place = folder / "image", folder / "storage"
    place.mkdir()
    tools = ("mkfs.ext4", "fsfreeze", "mount", "umount")
    if os.geteuid() != 0 or not all(map(shutil.which, tools)):
        pytest.skip("needs root, mkfs.ext4 and fsfreeze")
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, place], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["fsfreeze", "-f", place], check=True)
        yield place
    finally:
        subprocess.run(["fsfreeze", "-u", place], check=False, capture_output=True)
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.torchrun
@SLOW
@pytest.mark.parametrize("ranks", [2, 3])
def test_storage_that_does_not_answer(tmp_path, ranks: int) -> None:
    """Not even SIGKILL ends that rank: the verdict is there while it hangs."""
    run = tmp_path / "run"
    with frozen_storage(tmp_path) as storage:
        command = [*DDPDOCTOR_RUN, "--out", str(run), *AFTER, "--", *TORCHRUN, str(ranks), STOPPING]
        environment = clean_environment(DDPDOCTOR_TEST_STORAGE=str(storage))
        with started([[*command, "--how", "in_storage"]], [environment], tmp_path) as processes:
            wait_for_stall(run)
            diagnosis, finding = verdict_on(run)
            subprocess.run(["fsfreeze", "-u", storage], check=True)
            processes[0].communicate(timeout=120)
            assert processes[0].returncode == 0
    assert (finding.rule, finding.ranks, at(finding)) == ("hang/not-reached", [1], ["in_storage"])
    assert diagnosis.facts["hang"]["not_reached"]["doing"] == "storage"


def wait_for_stall(run: Path) -> None:
    """Until a run directory tells of a standstill, and what its ranks say of it has come there."""
    (stall,) = until(lambda: list(run.glob("hosts/*/stall.json")))
    until(
        lambda: json.loads(stall.read_text())["state"] == "lasts" and list(run.glob("ranks/*/standing.json"))
    )
    time.sleep(2)  # the storage process comes by once a second


@contextlib.contextmanager
def little_memory(limit_bytes: int) -> Iterator[Path]:
    """A control group with so much memory; skips the test where none can be made."""
    for root, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"ddpdoctor-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            time.sleep(0.5)
            group.rmdir()
        return
    pytest.skip("no control group with a limit of memory can be made here")


@pytest.mark.torchrun
@SLOW
@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_that_is_used_up(tmp_path, ranks: int) -> None:
    with little_memory((600 + 350 * ranks) << 20) as group:
        job = [*TORCHRUN, str(ranks), STOPPING, "--how", "out_of_memory"]
        inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        recorded = run_under(tmp_path, [*inside, *job], *AFTER)
    diagnosis, finding = verdict_on(recorded.run)
    assert (finding.rule, finding.ranks) == ("hang/rank-died", [1]), diagnosis.facts["hang"]
    assert diagnosis.facts["hang"]["died"]["kind"] == "memory"
    headline = diagnosis.verdict.headline
    assert headline.startswith("The job failed: rank 1 was OOM-killed by the kernel (SIGKILL)")
    assert headline.endswith("(launcher exit code 1)") and "is the last it recorded" in headline


@pytest.mark.torchrun
@SLOW
@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}")
@pytest.mark.parametrize("how", ["no", "asleep_in_a_lock", "extra_barrier", "in_a_loop"])
def test_two_hosts_of_which_the_link_is_cut(tmp_path, how: str) -> None:
    """In the midst of the job, or while one rank stands anyway: then that one is named, and not the link."""
    folders = [tmp_path / "first", tmp_path / "second"]
    with two_hosts() as hosts:
        commands = []
        for node, folder in enumerate(folders):
            job = [*hosts.torchrun(node), STOPPING, "--how", how, "--step-s", "0.1", "--steps", "200"]
            job += ["--for-s", "100"]
            commands.append(hosts.on(node, [*DDPDOCTOR_RUN, "--out", str(folder), *AFTER, "--", *job]))
        environments = [clean_environment(GLOO_SOCKET_IFNAME=device) for device in hosts.names]
        with started(commands, environments, tmp_path) as processes:
            log = folders[0] / "ranks/00000/steps.jsonl"
            until(lambda: log.exists() and b'"step":20' in log.read_bytes())
            cut = ["ip", "-n", hosts.names[1], "link", "set", hosts.names[1], "down"]
            if how == "no":
                subprocess.run(cut, check=True)
            wait_for_stall(folders[0])
            if how == "in_a_loop":  # which nobody on its host waits for: it is only asked
                until(lambda: list(folders[1].glob("ranks/*/standing.json")))
            else:
                wait_for_stall(folders[1])
            subprocess.run(cut, check=True)
            for process in processes:
                process.send_signal(signal.SIGKILL)
    diagnosis, finding = verdict_on(folders)
    if how == "no":
        assert (finding.rule, finding.ranks, at(finding)) == ("hang/stuck-together", None, ["main"])
        return
    rule = "hang/different-collectives" if how == "extra_barrier" else "hang/not-reached"
    assert (finding.rule, finding.ranks, at(finding)) == (rule, [1], [how]), diagnosis.facts["hang"]
