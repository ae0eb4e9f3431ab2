"""Many ranks: in parallel, one bad file at a time, one job at a time."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from functools import cached_property
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import psutil
import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import RankTrace, find_traces, load_trace, load_traces
from ddpdoctor.trace.processes import ProgressMessage, Task, receive, serve
from ddpdoctor.trace.sources import Source
from tests.trace.trace_files import SHARED, assert_same, columns, document, event, events, job, kernel, write

ROOT = Path(__file__).resolve().parents[3]
SECOND_US = 1_000_000


def shifted(by_us, count=5):
    return [{**e, "ts": e["ts"] + by_us} for e in events(count)]


@pytest.fixture
def always_processes(monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.load._WORTH_PROCESSES_BYTES", 0)


@pytest.mark.extended
def test_processes_give_what_one_process_gives(tmp_path, always_processes):
    files = job(tmp_path, [2, 0, 1])
    files.append(write(tmp_path / "bad.json", "{}"))
    one = load_traces(files, jobs=1)
    two = load_traces(files, jobs=2)
    assert [t.meta.rank for t in one.traces] == [t.meta.rank for t in two.traces] == [0, 1, 2]
    for mine, theirs in zip(one.traces, two.traces, strict=True):
        assert_same(mine, theirs)
    assert (
        one.failed
        == two.failed
        == [(files[3], f'{files[3]} holds no profiler events: it has no list "traceEvents".')]
    )


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_file_counts_by_its_bytes(tmp_path, always_processes, jobs):
    """A file of which nothing can be used is done with, too."""
    small, large = job(tmp_path, [0])[0], write(tmp_path / "rank1.json", document(events(2000), 1))
    files = [small, large, write(tmp_path / "bad.json", "{}")]
    told = []
    load_traces(files, jobs=jobs, progress=told.append)
    sizes = [Path(file).stat().st_size for file in files]
    assert told == sorted(told) and told[-1] == pytest.approx(1)
    assert any(
        part == pytest.approx(sum(chosen) / sum(sizes))
        for part in told
        for chosen in ([sizes[0]], [sizes[0], sizes[2]], [sizes[1]], [sizes[1], sizes[2]])
    )


def test_how_far_a_large_file_is_shows_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(Source.pieces, "__defaults__", (1 << 16,))
    monkeypatch.setattr("ddpdoctor.trace.sources._READ_BYTES", 1 << 12)
    file, told = write(tmp_path / "rank0.json.gz", json.dumps(document(events(4000)))), []
    load_traces([file], jobs=1, progress=told.append)
    within = [part for part in told if 0 < part < 1]
    assert len(within) > 10 and told == sorted(told)
    assert within[0] < 0.3 and within[-1] > 0.8 and told[-1] == 1


def test_a_process_says_how_far_it_is_before_it_has_the_columns(tmp_path, monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.processes._PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(Source.pieces, "__defaults__", (1 << 16,))
    file = write(tmp_path / "rank0.json", json.dumps(document(events(4000))))
    ours, theirs = Pipe()
    serving = threading.Thread(target=serve, args=(theirs,))
    serving.start()
    ours.send(Task(3, file, None, False))
    parts = []
    while isinstance(told := receive(ours), ProgressMessage):
        parts.append(told)
    ours.close()
    serving.join()
    number, trace, reason = told
    assert (number, reason) == (3, "") and {part.number for part in parts} == {3}
    assert len(parts) > 5 and all(0 <= part.done < 1 for part in parts)
    assert_same(trace, load_trace(file))


def test_columns_that_end_early_are_no_result():
    ours, theirs = Pipe()
    theirs.send((b"", [1000]))
    os.write(theirs.fileno(), b"columns")
    theirs.close()
    with pytest.raises(EOFError):
        receive(ours)


def test_a_worker_that_dies_names_its_file_and_the_rest_goes_on(tmp_path, always_processes):
    files = job(tmp_path, [0, 1, 2])
    os.mkfifo(tmp_path / "stuck.json")
    stuck = str(tmp_path / "stuck.json")

    def kill_once_the_others_are_done(part):
        for process in psutil.Process().children() if part > 0.99 else []:
            with contextlib.suppress(psutil.Error):
                if "ddpdoctor.trace.processes" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGKILL)

    loaded = load_traces([stuck, *files], jobs=2, progress=kill_once_the_others_are_done)
    assert [t.meta.rank for t in loaded.traces] == [0, 1, 2]
    assert [file for file, _ in loaded.failed] == [stuck]
    assert "ended by signal 9" in loaded.failed[0][1]


@pytest.mark.extended
def test_memory_grows_with_the_columns_and_not_with_the_text(tmp_path, monkeypatch):
    """At most 1.5 bytes more for each byte more of columns; the text is four times as large as they are."""
    monkeypatch.setattr(Source.pieces, "__defaults__", (1 << 16,))  # the fixed part: pieces under way
    monkeypatch.setattr("ddpdoctor.trace.sources._READ_BYTES", 1 << 14)
    peaks, sizes, texts = [], [], []
    for count in (4_000, 16_000):
        path = write(tmp_path / f"{count}.json.gz", json.dumps(document(events(count))))
        texts.append(len(gzip.decompress(Path(path).read_bytes())))
        tracemalloc.start()
        trace = load_trace(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(sum(c.nbytes for c in columns(trace).values() if isinstance(c, np.ndarray)))
    grown = sizes[1] - sizes[0]
    assert texts[1] - texts[0] > 3 * grown
    assert peaks[1] - peaks[0] <= 1.5 * grown


LITTLE_MEMORY = """
import re, resource, sys
from pathlib import Path
from ddpdoctor.trace import cache
from ddpdoctor.trace import load
import polars
load._WORTH_PROCESSES_BYTES = 0
used = int(re.search(r"VmSize:[ \t]+([0-9]+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
loaded = load.load_traces(sys.argv[1:], jobs=2)
print([t.meta.rank for t in loaded.traces], *[file for file, _ in loaded.failed])
print(*[reason for _, reason in loaded.failed], file=sys.stderr)
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_that_is_too_large_for_the_memory_is_named_and_the_rest_goes_on(tmp_path):
    """The processes have 200 MB more than their libraries take; one file's names alone take more."""
    files = job(tmp_path, [0, 1, 2])
    name = "n" * 1000
    huge = document([event(f"{i}{name}") for i in range(1000)])
    text = json.dumps(huge)
    start, end = text.index("[{") + 1, text.rindex("}]") + 1
    with gzip.open(tmp_path / "huge.json.gz", "wt", compresslevel=1) as out:
        out.write(text[:start])
        for part in range(300):
            out.write(text[start:end].replace(name, f"{part}{name}") + ("," if part < 299 else ""))
        out.write(text[end:])
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, *files, str(tmp_path / "huge.json.gz")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
    )
    assert done.stdout.strip() == f"[0, 1, 2] {tmp_path / 'huge.json.gz'}", done.stderr
    assert (
        "does not fit in this machine's memory" in done.stderr
        or "the process that read it ended" in done.stderr
    )


def test_nothing_usable_is_an_error_with_the_reason(tmp_path):
    bad = write(tmp_path / "a.json", "{}")
    with pytest.raises(UnusableInput, match="no list"):
        load_traces([bad])
    with pytest.raises(UnusableInput, match="None of the 2 files"):
        load_traces([bad, bad + "x"])
    with pytest.raises(UnusableInput, match="No profiler trace"):
        load_traces([])


def test_ranks_given_by_the_caller(tmp_path):
    files = job(tmp_path, [0, 0])
    files = [files[0], write(tmp_path / "other.json", document(events(30), rank=0))]
    loaded = load_traces(files, ranks={files[0]: 3, files[1]: 1})
    assert [(t.meta.rank, t.meta.rank_from) for t in loaded.traces] == [
        (1, "run directory"),
        (3, "run directory"),
    ]


def test_without_any_rank_files_are_numbered_in_order_with_a_note(tmp_path):
    files = [write(tmp_path / f"{n}.json", events(5)) for n in ("b", "a")]
    loaded = load_traces(files)
    assert [(t.meta.rank, t.meta.source) for t in loaded.traces] == [(0, files[1]), (1, files[0])]
    assert any("numbered in the order" in note for note in loaded.notes)
    single = load_traces(files[:1])
    assert single.traces[0].meta.rank is None and not single.notes


def test_a_file_without_rank_among_others_is_left_out(tmp_path):
    content = [{**e} for e in events(5)]
    files = [
        write(tmp_path / "rank0.json", content),
        write(tmp_path / "rank1.json", content),
        write(tmp_path / "x.json", content),
    ]
    loaded = load_traces(files)
    assert [t.meta.rank for t in loaded.traces] == [0, 1]
    assert any("skipped" in note and "x.json" in note for note in loaded.notes)


def test_of_several_windows_the_latest_that_the_ranks_share_is_used(tmp_path):
    files = {}
    for rank, windows in ((0, (0, 5, 10)), (1, (0, 5)), (2, (0, 5, 10))):
        for w in windows:
            content = document(shifted(w * SECOND_US), rank=rank, world_size=3)
            files[rank, w] = write(tmp_path / f"r{rank}_{w}.json", content)
    loaded = load_traces(list(files.values()))
    assert [t.meta.source for t in loaded.traces] == [files[0, 5], files[1, 5], files[2, 5]]
    assert sum("traces" in note for note in loaded.notes) == 3


def test_two_jobs_in_one_folder_are_refused_unless_one_is_chosen(tmp_path):
    files = job(tmp_path, range(3), world_size=3)
    other = write(tmp_path / "other.json", document(events(500), rank=0, world_size=8))
    with pytest.raises(UnusableInput) as raised:
        load_traces([*files, other])
    assert "(1) 3 rank(s) over nccl, 3 file(s)" in str(raised.value) and f"such as {other}" in str(
        raised.value
    )
    assert [t.meta.source for t in load_traces([*files, other], job=1).traces] == files
    second = load_traces([*files, other], job=2)
    assert [t.meta.source for t in second.traces] == [other] and "3 left out" in second.notes[0]
    with pytest.raises(UnusableInput, match="There is no job 3"):
        load_traces([*files, other], job=3)


def test_of_two_recordings_of_a_job_the_larger_is_used_and_the_other_can_be_chosen(tmp_path):
    files = job(tmp_path, range(3), world_size=3)
    late = write(tmp_path / "late.json", document(shifted(3600 * SECOND_US), rank=1, world_size=3))
    unknown = write(tmp_path / "list.json", events(3))
    loaded = load_traces([*files, late, unknown])
    assert [t.meta.source for t in loaded.traces] == files
    assert [note for note in loaded.notes if "2 left out" in note and "--job N" in note]
    assert {t.meta.source for n in (2, 3) for t in load_traces([*files, late, unknown], job=n).traces} == {
        late,
        unknown,
    }


def test_a_long_event_does_not_hide_that_windows_overlap(tmp_path):
    long = document([event("ProfilerStep#1", 0, 3000 * SECOND_US), event("x", 1, 1)], rank=0)
    late = document([event("x", 2900 * SECOND_US, 5)], rank=1)
    loaded = load_traces([write(tmp_path / "a.json", long), write(tmp_path / "b.json", late)])
    assert len(loaded.traces) == 2


@pytest.mark.extended
@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
def test_public_sets(always_processes):
    expected = {
        "torchrec/sst_sleep_pl_dense_after_backward_2": [0, 1, 2, 3],
        "param/dlrm_8rank": list(range(8)),
        "hta/rank_unavailable": [0, 1],
        "hta/cpu_only": [34],
        "kineto/resnet50_workers_4": [0],
        "tracelens/mi300_ddp_resnet18": [None],
    }
    for folder, ranks in expected.items():
        loaded = load_traces(find_traces([str(SHARED / folder)]).files, jobs=2)
        assert [t.meta.rank for t in loaded.traces] == ranks and not loaded.failed
    odd = load_traces(find_traces([str(SHARED / "odd")]).files)
    assert {reason.rpartition(": ")[2] for _, reason in odd.failed} == {
        "its list of events is empty.",
        "fetch it with `git lfs pull`.",
    }


def test_a_worker_that_hangs_is_given_up_and_the_rest_goes_on(tmp_path, always_processes, monkeypatch):
    files = job(tmp_path, [0, 1])
    os.mkfifo(tmp_path / "stuck.json")
    stuck = str(tmp_path / "stuck.json")
    monkeypatch.setattr("ddpdoctor.trace.processes._UNKNOWN_SIZE_TIMEOUT_S", 1.0)
    loaded = load_traces([stuck, *files], jobs=2)
    assert [t.meta.rank for t in loaded.traces] == [0, 1]
    assert loaded.failed == [(stuck, f"{stuck}: the process that read it did not finish and was given up.")]


def test_workers_import_nothing_from_the_folder_they_are_started_in(tmp_path, always_processes, monkeypatch):
    """It may be anybody's: a shared folder of traces, or /tmp."""
    for name in ("numpy", "ddpdoctor", "msgspec"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(13)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ".")])
    loaded = load_traces(job(tmp_path, [0, 1]), jobs=2)
    assert [t.meta.rank for t in loaded.traces] == [0, 1] and not loaded.failed


def test_how_long_a_trace_is_is_added_up_once(tmp_path, monkeypatch):
    spans = []

    def counted(trace):
        spans.append(trace)
        return int(trace.start_ns[0]), int(trace.end_ns.max())

    span_ns = cached_property(counted)
    span_ns.__set_name__(RankTrace, "span_ns")
    monkeypatch.setattr(RankTrace, "span_ns", span_ns)
    traces = [
        load_trace(write(tmp_path / f"{name}.json", document(events(9), rank)))
        for name, rank in (("a", 0), ("b", 0), ("c", 1))
    ]
    monkeypatch.setattr(
        "ddpdoctor.trace.load.read_traces",
        lambda *_, **__: [(n, trace, "") for n, trace in enumerate(traces)],
    )
    assert len(load_traces(["a"]).traces) == 2
    assert len(spans) == 3


def launches_alone(made):
    """These events without what the host itself recorded: as of a profiler that records launches and kernels only."""
    return [e for e in made if e.get("cat") not in ("cpu_op", "user_annotation")]


def after(made, by_us):
    """The same later, with launches of their own."""
    moved = [{**e, "ts": e["ts"] + by_us} for e in made if e["ph"] == "X"]
    return [
        {**e, "args": {**e["args"], "correlation": e["args"]["correlation"] + 10_000}}
        if "correlation" in e["args"]
        else e
        for e in moved
    ]


def a_reduction(ts, correlation):
    """The launch and the kernel of a collective, with metadata on the kernel."""
    args = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 64, "dtype": "Float"}
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    call = event("cudaLaunchKernel", ts, 2.0, "cuda_runtime", correlation=correlation)
    return [call, kernel(name, ts + 3.0, 9.0, stream=16, correlation=correlation, **args)]


def test_what_is_launched_after_the_recording_of_the_host_is_of_no_step(tmp_path):
    """torch records operators until the window ends, kernels for a second longer, if another part of the profiler lags behind."""
    last_us = max(e["ts"] + e["dur"] for e in events(40) if e.get("cat") == "cpu_op")
    wholly = [
        *events(40),
        *a_reduction(1_000_050, 9001),
        kernel("void late()", last_us + 50, correlation=5000 + 39),
    ]
    beyond = launches_alone(after([*events(300), *a_reduction(1_000_050, 9001)], last_us - 1_000_000 + 1))
    alone = load_traces([write(tmp_path / "rank0.json", document(wholly))]).traces[0]
    with_more = load_traces([write(tmp_path / "rank0.json", document([*wholly, *beyond]))]).traces[0]
    assert load_trace(str(tmp_path / "rank0.json")).size > alone.size + 600
    for name in ("start_ns", "duration_ns", "correlation", "stream", "external_id", "bytes"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(with_more, name))
    assert list(map(alone.name_of, range(alone.size))) == list(map(with_more.name_of, range(alone.size)))
    assert with_more.collectives.event.tolist() == alone.collectives.event.tolist()
    assert len(with_more.collectives.event) == 1 and with_more.lane.max() < with_more.size


def test_a_trace_of_kernels_alone_stays_whole(tmp_path):
    """Annotations may be anywhere in it."""
    kernels = [event("epoch 1", 1_000_000, 50.0, "user_annotation"), *launches_alone(events(300))]
    file = write(tmp_path / "rank0.json", document(kernels))
    assert_same(load_traces([file]).traces[0], load_trace(file))


def test_calls_after_the_last_operator_stay_if_they_launch_nothing(tmp_path):
    """A profiler that ends waits for the device."""
    ended = [*events(40), event("cudaDeviceSynchronize", 1_002_000, 50.0, "cuda_runtime", correlation=77_000)]
    file = write(tmp_path / "rank0.json", document(ended))
    assert_same(load_traces([file]).traces[0], load_trace(file))


def test_a_graph_that_is_launched_after_the_last_operator_stays(tmp_path):
    """Its replay is no operator, and the copy of its input before it is one."""
    copied = [event("aten::copy_", 1_000_000, 9.0, "cpu_op", **{"External id": 1})]
    copied += [event("cudaMemcpyAsync", 1_000_002, 2.0, "cuda_runtime", correlation=1, **{"External id": 1})]
    copied += [
        {
            **kernel("Memcpy DtoD (Device -> Device)", 1_000_009, 2.0, correlation=1, **{"External id": 1}),
            "cat": "gpu_memcpy",
        }
    ]
    replayed = [event("cudaGraphLaunch", 1_000_020, 8.0, "cuda_runtime", correlation=2)]
    replayed += [kernel(f"gemm_{n}", 1_000_030 + 10 * n, 9.0, correlation=2) for n in range(20)]
    file = write(tmp_path / "rank0.json", document([*copied, *replayed]))
    assert_same(load_traces([file]).traces[0], load_trace(file))
