"""The host, process and cgroup samplers, for real, beside a busy child process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.telemetry.host import HOST_FIELDS, Cgroup, HostSampler, numa_nodes, rate
from ddpdoctor.telemetry.sampler import RANK_FIELDS, ProcessTreeSampler
from tests.waiting import until

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A rank that sleeps, with one worker that computes and writes: the tree is busy, its main process is not.
TREE = """
import multiprocessing, os, sys, time
def work(path):
    out = os.open(path, os.O_WRONLY | os.O_CREAT)
    while True:
        sum(range(20000))
        os.pwrite(out, bytes(1 << 16), 0)
if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1],), daemon=True).start()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", TREE, str(tmp_path / "out")], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        child.stdout.readline()
        yield child
        os.killpg(child.pid, 9)


@pytest.mark.alone
def test_host_sample_has_all_fields(tree):
    sampler = HostSampler()
    first = sampler.sample()
    time.sleep(0.5)
    second = sampler.sample()
    assert tuple(first) == tuple(second) == HOST_FIELDS
    assert first["cpu_percent"] is None and first["swap_in_bytes_per_s"] is None, "no rate from one reading"
    assert 0 < second["cpu_percent"] <= 100, "a child is computing"
    assert second["swap_in_bytes_per_s"] >= 0 <= second["iowait_percent"]
    assert 0 < second["memory_used_bytes"] < sampler.facts["memory_total_bytes"]
    assert 1 <= sampler.facts["cpu_count_usable"] <= sampler.facts["cpu_count_logical"]
    assert sampler.facts["cgroup_cpu_limit_cores"] == Cgroup().cpu_limit_cores()
    assert sampler.notes == []


@pytest.mark.parametrize(
    ("text", "count"), [("0\n", 1), ("0-1\n", 2), ("0-1,3\n", 3), ("\n", None), ("?\n", None), (None, None)]
)
def test_numa_nodes_with_cpus_are_counted(tmp_path, text, count):
    if text is not None:
        (tmp_path / "has_cpu").write_text(text)
    assert numa_nodes(str(tmp_path / "has_cpu")) == count


def test_each_direction_of_swapping_is_a_rate_of_its_own(monkeypatch):
    counts = iter([(1000, 50_000), (1000, 90_000)])
    monkeypatch.setattr("ddpdoctor.telemetry.host.swapped_bytes", lambda: next(counts))
    sampler = HostSampler()
    sampler.sample()
    second = sampler.sample()
    assert second["swap_in_bytes_per_s"] == 0.0 < second["swap_out_bytes_per_s"]


@linux
@pytest.mark.alone
def test_a_process_tree(tree):
    sampler = ProcessTreeSampler(lambda: {3: tree.pid})
    sampler.sample()
    time.sleep(0.6)
    ranks = sampler.sample()
    assert list(ranks) == ["3"]
    rank = ranks["3"]
    assert tuple(rank) == RANK_FIELDS
    assert rank["pid"] == tree.pid and rank["num_children"] == 1
    assert 5 < rank["cpu_percent"] <= 130, "the worker computes, the rank sleeps"
    assert rank["rss_bytes"] > rank["process_rss_bytes"] > rank["process_memory_bytes"] > 1 << 20
    assert 0 < rank["children_memory_bytes"] < rank["rss_bytes"] - rank["process_rss_bytes"]


@linux
def test_a_rank_that_another_one_started_is_no_worker_of_it(tree):
    """Lightning's first rank starts the others."""
    (child,) = psutil.Process(tree.pid).children()
    ranks = ProcessTreeSampler(lambda: {0: tree.pid, 1: child.pid}).sample()
    assert ranks["0"]["num_children"] == 0 == ranks["0"]["children_memory_bytes"]
    assert ranks["0"]["rss_bytes"] == ranks["0"]["process_rss_bytes"]
    assert ranks["1"]["pid"] == child.pid and ranks["1"]["rss_bytes"] > 0


@linux
@pytest.mark.alone
def test_programs_outside_of_the_job_that_compute_are_named(tmp_path):
    """The rank's own tree is no other program, and a program that sleeps is none that computes."""
    busy, child = tmp_path / "other-job", tmp_path / "child"
    for program in (busy, child):
        program.symlink_to(shutil.which("sh"))
    spin = "while :; do :; done"
    with (
        subprocess.Popen([str(busy), "-c", spin]) as other,
        subprocess.Popen(["/bin/sh", "-c", f"{child} -c '{spin}' & {spin}"]) as rank,
    ):
        try:
            until(lambda: "child" in [each.name() for each in psutil.Process(rank.pid).children()])
            sampler = ProcessTreeSampler(lambda: {0: rank.pid})
            sampler.sample()
            assert sampler.other_programs() is None, "no rate from one reading"
            assert sampler.other_programs() is None, "too soon"
            time.sleep(1.5)
            sampler.sample()
            programs = {each["name"]: each for each in sampler.other_programs()}
        finally:
            other.kill()
            for started in psutil.Process(rank.pid).children():
                started.kill()
            rank.kill()
    assert (
        programs["child"]["rank"] == 0
        and programs["child"]["cores"] > 0.1
        and "rank" not in programs["other-job"]
    )
    assert programs["other-job"]["processes"] == 1 and 0.1 < programs["other-job"]["cores"] < 1.2
    assert "sh" not in programs


@linux
@pytest.mark.alone
def test_a_worker_started_later_counts_from_its_birth(tmp_path):
    pids = {}
    sampler = ProcessTreeSampler(lambda: pids)
    pids[0] = os.getpid()
    before = sampler.sample()["0"]["num_children"]
    spin = (
        "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", spin]) as child:
        deadline = time.monotonic() + 30
        began = time.monotonic()
        while _cpu_s(child.pid) < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        rank = sampler.sample()["0"]
        elapsed_s = time.monotonic() - began
        child.kill()
    assert rank["num_children"] == before + 1
    assert rank["cpu_percent"] * elapsed_s / 100 > 0.2


GROWS = """
import mmap, sys
kept, shared = bytearray(64 << 20), mmap.mmap(-1, 32 << 20)
shared.write(bytes(32 << 20))
with open(sys.argv[1], "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(pages[::4096])
print("ready", flush=True)
sys.stdin.read()
"""


@linux
def test_pages_of_files_are_no_memory_of_the_process(tmp_path):
    """A memory map that is read through fills its resident memory; arrays and shared memory are its own."""
    (tmp_path / "data").write_bytes(bytes(128 << 20))
    with subprocess.Popen(
        [sys.executable, "-c", GROWS, str(tmp_path / "data")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        rank = ProcessTreeSampler(lambda: {0: child.pid}).sample()["0"]
    assert 96 << 20 < rank["process_memory_bytes"] < 120 << 20
    assert rank["process_rss_bytes"] > 224 << 20


def _cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_process_that_is_gone_is_null():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    sampler = ProcessTreeSampler(lambda: {0: child.pid, 1: os.getpid()})
    ranks = sampler.sample()
    assert ranks["0"] == {**dict.fromkeys(RANK_FIELDS), "pid": child.pid}
    assert ranks["1"]["rss_bytes"] > 0
    assert sampler.notes == []


def test_failing_rank_pids_are_noted_once():
    def rank_pids():
        raise RuntimeError("rank.json is odd")

    sampler = ProcessTreeSampler(rank_pids)
    assert sampler.sample() == sampler.sample() == {}
    assert [str(note) for note in sampler.notes] == ["The ranks' processes cannot be read: rank.json is odd."]


def test_rate():
    assert rate(30, 10, 2.0) == 10.0
    assert rate(10, 30, 2.0) is None, "the counter was reset"
    assert rate(10, None, 2.0) is None and rate(10, 5, 0.0) is None and rate(None, 5, 1.0) is None


def _fake_proc(tmp_path, cgroup, mountinfo):
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "mountinfo").write_text(mountinfo)
    return Cgroup(tmp_path)


def test_cgroup_v2_takes_the_tightest_limit_of_all_levels(tmp_path):
    mount = tmp_path / "fs"
    own = mount / "job" / "step"
    own.mkdir(parents=True)
    for level in (mount, mount / "job", own):
        (level / "cgroup.controllers").write_text("cpu memory")
    (own / "cpu.max").write_text("max 100000\n")
    (mount / "job" / "cpu.max").write_text("250000 100000\n")
    (own / "memory.max").write_text("max\n")
    (mount / "job" / "memory.max").write_text("1073741824\n")
    (own / "memory.current").write_text("4096\n")
    group = _fake_proc(tmp_path, "0::/job/step\n", f"30 20 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    assert (group.version, group.cpu_limit_cores(), group.memory_limit_bytes()) == (2, 2.5, 1 << 30)
    assert group.free_memory_bytes() is None, "what is used where the limit stands is not known"
    (mount / "job" / "memory.current").write_text(str(800 << 20))
    (mount / "job" / "memory.stat").write_text(f"active_file {100 << 20}\ninactive_file {50 << 20}\n")
    assert group.free_memory_bytes() == (1024 - 650) << 20, "caches of files are free"


def test_cgroup_v1_in_a_container(tmp_path):
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    cpu.mkdir()
    memory.mkdir()
    (cpu / "cpu.cfs_quota_us").write_text("50000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (memory / "memory.usage_in_bytes").write_text("77\n")
    group = _fake_proc(
        tmp_path,
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        f"31 20 0:27 /docker/abc {cpu} rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 20 0:28 /docker/abc {memory} rw - cgroup cgroup rw,memory\n",
    )
    assert (group.version, group.cpu_limit_cores(), group.memory_limit_bytes()) == (1, 0.5, None)
    assert group.free_memory_bytes() is None


def test_no_cgroup(tmp_path):
    group = Cgroup(tmp_path / "nothing")
    assert [
        group.version,
        group.cpu_limit_cores(),
        group.memory_limit_bytes(),
        group.free_memory_bytes(),
    ] == [None] * 4
