"""Reading flight recorder dumps: the real ones, and bad ones, each of which costs one sentence."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.places import CodeLine
from ddpdoctor.report.html import render_html
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.stall import find_dumps
from ddpdoctor.stall.plainpickle import NotPlainError, read_plain
from ddpdoctor.stall.recording import lines_of
from ddpdoctor.stall.verdict import of_dumps
from tests.privileges import as_anybody

from .recorded import Stopped
from .simulated import data_parallel, write

REAL = Path(__file__).resolve().parents[3] / "shared" / "hangs"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real dumps are not here")


@needs_real
@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_both_guilty_ranks_of_real_jobs_are_named_with_group_and_collective(case):
    diagnosis = analyze([str(REAL / case)])
    finding = diagnosis.findings[0]
    assert (finding.rule, finding.ranks) == ("hang/not-reached", [9, 14])
    stop = diagnosis.facts["hang"]["not_reached"]
    assert (stop["group"], stop["collective"]) == ("EXPERT_MODEL_PARALLEL_GROUP (group 72)", "all_to_all")
    assert (stop["doing"] == "device") is (case == "gpu_error_2nd")
    assert stop["tensors"] == "2048x5120 BFloat16"
    page = render_html(diagnosis)
    assert "State of each rank according to its flight recorder dump" in page
    assert "Cost per step" not in page and "0 steps on" not in page
    assert "| → 9 |" in render_markdown(diagnosis)


@needs_real
@pytest.mark.parametrize("lost", range(16))
@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_a_lost_dump_does_not_hide_those_whose_dumps_show_that_they_did_not_come(tmp_path, case, lost):
    for file in (REAL / case).glob("_dump_*"):
        if file.name != f"_dump_{lost}":
            shutil.copy2(file, tmp_path)
    verdict = of_dumps(find_dumps([str(tmp_path)]))
    assert verdict.facts.not_reached.ranks == [rank for rank in (9, 14) if rank != lost]
    assert f"There is no readable flight recorder dump of rank {lost}." in verdict.notes


def _without(folder: Path, case: str, lost: set[int]) -> str:
    for file in (REAL / case).glob("_dump_*"):
        if int(file.name.removeprefix("_dump_")) not in lost:
            shutil.copy2(file, folder)
    return str(folder)


@needs_real
@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_whether_ranks_without_a_dump_arrived_is_unknown(tmp_path, case):
    """Ranks 6 and 7 wait for messages as ranks 4 and 5 do, whose collective with them comes after those messages."""
    diagnosis = analyze([_without(tmp_path, case, {6, 7, 9, 14})])
    (finding,) = diagnosis.findings
    assert finding.ranks == [9, 14]
    assert "whether ranks 9 and 14 arrived is unknown: they left no dump" in diagnosis.verdict.headline
    told = " ".join([finding.title, finding.explanation, diagnosis.verdict.headline])
    assert not re.search(
        r"have not (?:arrived|reached|issued)|are missing|did not arrive|never entered|at fault:", told
    )
    assert not any(each.guilty for each in diagnosis.standing if each.rank in (6, 7))


@needs_real
@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_too_few_dumps_show_no_rank_that_is_waited_for(tmp_path, case):
    diagnosis = analyze([_without(tmp_path, case, set(range(16)) - {0, 4, 8, 10, 12})])
    assert diagnosis.verdict.headline == (
        "Cannot tell for which rank the others wait: only 5 of 16 ranks left a flight recorder dump."
    )
    (waits,) = [note for note in diagnosis.notes if note.endswith("arrived is unknown.")]
    assert re.match(
        r"Ranks 8, 10 and 12 wait in all_to_all with sequence number \d+ of EXPERT_MODEL_PARALLEL_GROUP \(group \d+\); ",
        waits,
    )
    assert "whether ranks 9, 11 and 13 to 15 arrived" in waits
    assert [each.rank for each in diagnosis.standing] == [0, 4, 8, 10, 12]
    assert not any(each.guilty for each in diagnosis.standing)
    assert not any("No rank waits" in note for note in diagnosis.notes)
    assert not diagnosis.checked


@needs_real
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_no_choice_of_dumps_makes_a_rank_miss_that_was_there(tmp_path, case, seed):
    dice = random.Random(seed)
    lost = set(dice.sample(range(16), dice.randrange(2, 9)))
    facts = of_dumps(find_dumps([_without(tmp_path, case, lost)])).facts
    assert facts.together is None and facts.different is None
    if facts.not_reached is not None and not facts.not_reached.arrival_unknown:
        assert set(facts.not_reached.ranks) <= {9, 14} - lost
    elif facts.not_reached is not None:
        assert set(facts.not_reached.ranks) <= lost


@needs_real
@pytest.mark.parametrize("case", ["gpu_error_2nd", "lock_gil_1st"])
def test_the_table_has_the_collective_that_the_verdict_names(case):
    diagnosis = analyze([str(REAL / case)])
    number = diagnosis.facts["hang"]["not_reached"]["sequence"]
    by_rank = {each.rank: each.collective for each in diagnosis.standing}
    group = "EXPERT_MODEL_PARALLEL_GROUP (group 72)"
    assert {by_rank[rank] for rank in (8, 10, 11, 12, 13, 15)} == {
        f"all_to_all with sequence number {number} of {group}"
    }
    assert (
        by_rank[9]
        == {
            "gpu_error_2nd": "_all_gather_base with sequence number 87749 of TENSOR_MODEL_PARALLEL_GROUP (group 37)",
            "lock_gil_1st": f"sequence number {number - 1} of {group}, finished",
        }[case]
    )
    assert by_rank[0].endswith("rank 8")


@needs_real
def test_a_stopped_device_may_be_its_watchdog():
    diagnosis = analyze([str(REAL / "gpu_error_2nd")])
    assert (
        "hung: ranks 9 and 14 are stuck in collectives that others have finished"
        in diagnosis.verdict.headline
    )
    (finding,) = diagnosis.findings
    assert "Ranks 9 and 14 last issued sequence number 44790" in finding.explanation
    assert "each have 18 unfinished collectives" in finding.explanation
    assert "Ranks 0 to 7 wait elsewhere (see the table)" in finding.explanation
    why = {each.rule: each.why for each in diagnosis.skipped}
    assert why["allreduce/exposed"] == "time in collectives was not measured"
    assert "a recorded run shows this" in why["hang/rank-died"]
    assert {each.rule for each in diagnosis.checked} == {"hang/different-collectives", "hang/stuck-together"}


@needs_real
def test_real_dumps_read_as_pickle_reads_them():
    class Refusing(pickle.Unpickler):
        def find_class(self, module, name):
            raise AssertionError((module, name))

    for file in REAL.glob("*/_dump_*"):
        with file.open("rb") as source:
            assert read_plain(file.read_bytes()) == Refusing(source).load()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_of_every_protocol(protocol):
    value = {
        "a": [1, 255, 70_000, -1, 2**62, (), (1,), (1, 2, 3, 4)],
        "b": {"é" * 300: None, "1": 1.5, "0": False},
    }
    assert read_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps(os.system), "class or a function"),
        (pickle.dumps({1, 2}, 2), "class or a function"),
        (b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.", "class or a function"),
        (b"\x80\x02K\x01K\x02R.", "asks for a call"),
        (b"\x80\x02", "cut off"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "cut off"),
        (b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".", "64 bits"),
        (b"\x80\x02\x8a\x09" + b"\x01" * 9 + b".", "64 bits"),
        *((pickle.dumps({key: 1}, 2), "for a key") for key in (7, 7.0, True, None, (), "a" * 2000)),
        (b"\x80\x02](" + b"}" * (2 << 20) + b"e.", "more values"),
        (b"\x80\x02e.", "cut off"),
        (b"\x80\x02K\x01(K\x02e.", "damaged"),
        (pickle.dumps({"entries": [1] * 999})[:500], "cut off"),
    ],
)
def test_what_is_not_plain_is_refused_with_the_reason(data, why):
    with pytest.raises(NotPlainError, match=why):
        read_plain(data)


def test_bad_dumps_cost_a_sentence_each_and_the_rest_is_analysed(tmp_path):
    folder = Path(write(tmp_path, replace(data_parallel(8), host_stops={3: 10})))
    whole = (folder / "_dump_5").read_bytes()
    (folder / "_dump_4").write_bytes(whole[: len(whole) // 2])
    (folder / "_dump_5").write_bytes(pickle.dumps(os.system))
    (folder / "_dump_6").write_bytes(pickle.dumps({"weights": [1, 2]}, 2))
    (folder / "_dump_7").write_bytes(b"")
    (folder / "_dump_2").chmod(0)
    for number, mode in ((12, 0o600), (13, 0)):
        (folder / f"events_{number}").write_bytes(b"something else")
        (folder / f"events_{number}").chmod(mode)
    with as_anybody():
        verdict = of_dumps(find_dumps([str(folder)]))
    assert verdict.facts.not_reached.ranks == [3]
    told = [note for note in verdict.notes if "left out" in note or "is empty" in note]
    assert len(told) == 5
    reasons = (
        (2, "permission denied"),
        (4, "cut off"),
        (5, "class or a function"),
        (6, "no dump"),
        (7, "is empty"),
    )
    for number, why in reasons:
        assert any(f"_dump_{number}" in note and why in note for note in told)


def shared(levels: int, kind: type = list):
    """A value of a few bytes that is without end once it is followed."""
    value = kind(["A" * 100] * 10)
    for _ in range(levels):
        value = kind([value] * 10)
    return value


@pytest.mark.parametrize(
    "field", ["process_group", "input_dtypes", "input_sizes", "frames", "pg_name", "retired"]
)
def test_a_value_that_refers_to_its_parts_without_end_is_refused(tmp_path, field):
    entry = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", field: shared(25)}
    (tmp_path / "_dump_0").write_bytes(pickle.dumps({"entries": [entry]}, 2))
    found = find_dumps([str(tmp_path)])
    assert not found.recordings
    assert "more values than" in found.notes[0]


def test_a_value_in_itself_and_a_key_without_end_are_refused():
    circle: list = []
    circle.append(circle)
    with pytest.raises(NotPlainError, match="refers to itself"):
        read_plain(pickle.dumps(circle, 2))
    with pytest.raises(NotPlainError, match="for a key"):
        read_plain(pickle.dumps([{(): 1}, {("a",): 1}], 2))


def test_containers_where_texts_belong_are_left_out(tmp_path):
    bad = shared(4)
    entry = {
        "collective_seq_id": 1,
        "profiling_name": "nccl:all_reduce",
        "process_group": [bad, bad],
        "input_dtypes": [bad, "Float"],
        "frames": [{"filename": "/job/train.py", "name": bad, "line": bad}, {"filename": None}],
    }
    config = {
        "0": {"ranks": "[" * 100_000 + "]" * 100_000, "desc": bad},
        "1": {"ranks": "[0, 1]", "desc": bad},
    }
    document = {"version": bad, "entries": [entry], "pg_config": config}
    (tmp_path / "_dump_0").write_bytes(pickle.dumps(document, 2))
    (recording,) = find_dumps([str(tmp_path)]).recordings
    (operation,) = recording.operations
    assert (operation.group.name, operation.input_dtypes) == ("", ("Float",))
    assert [(line.file, line.line, line.function) for line in operation.frames] == [("/job/train.py", 0, "")]
    assert [(name, key.description, key.members) for name, key in recording.groups.items()] == [
        ("1", "", (0, 1))
    ]


def test_only_bad_dumps_are_an_error_with_the_reason(tmp_path):
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(os.system))
    with pytest.raises(UnusableInput, match="class or a function"):
        analyze([str(tmp_path)])


def test_absurd_documents_are_read_as_far_as_they_make_sense(tmp_path):
    entry = {
        "collective_seq_id": "x",
        "profiling_name": 7,
        "process_group": 3,
        "input_sizes": "no",
        "frames": [{}],
    }
    good = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "process_group": ["0"], "state": 5}
    for rank, document in enumerate(
        [
            {
                "version": [],
                "entries": [entry, 5, good],
                "pg_config": {"0": {"ranks": "[0, 1"}},
                "pg_status": {"0": 3},
            },
            {
                "version": "9",
                "entries": [good | {"time_created_ns": 10**40}],
                "pg_config": [],
                "pg_status": [],
            },
        ]
    ):
        (tmp_path / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(document))
    assert len(find_dumps([str(tmp_path)]).recordings) == 2
    analyze([str(tmp_path)])


def test_a_dump_from_before_says_nothing_of_what_came_later(tmp_path):
    """Rank 2 dumped at an earlier timeout and was killed later: its dump is old, and it is the one without a recording."""
    job = replace(data_parallel(4), host_stops={2: 10})
    folder = Path(write(tmp_path, job))
    early = 1_758_580_000_000_000_000 - 3600 * 10**9
    document = pickle.loads((folder / "_dump_2").read_bytes())
    document["entries"] = []
    (folder / "_dump_2").write_bytes(pickle.dumps(document, 2))
    os.utime(folder / "_dump_2", ns=(early, early))
    assert of_dumps(find_dumps([str(folder)])).facts.not_reached.ranks == [2]


@pytest.mark.parametrize("line", ["x", -5, [1], None])
def test_frames_of_any_kind_cost_no_diagnosis(line):
    frames = [["/job/train.py", line, "main"], [None, None, None], ["/job/train.py", 7, "main"], 3]
    assert lines_of(frames)[-1] == CodeLine("/job/train.py", 7, "main")
    assert {each.line for each in lines_of(frames)} <= {0, 7}
    assert lines_of("abc") == []


def test_a_stop_that_cannot_be_analysed_is_a_note(tmp_path, monkeypatch):
    def broken(*_):
        raise RecursionError("too deep")

    monkeypatch.setattr("ddpdoctor.stall.verdict.of_run", broken)
    diagnosis = analyze([str(Stopped(tmp_path / "run").path)])
    assert "What stopped could not be analyzed: RecursionError: too deep." in diagnosis.notes
    assert diagnosis.steps.measured > 0


@pytest.mark.parametrize("text", ['{"traceEvents":[]}', '{"traceEvents":[', ""])
def test_a_bad_trace_beside_dumps_is_a_note(tmp_path, text):
    folder = Path(write(tmp_path, replace(data_parallel(4), host_stops={2: 10})))
    (folder / "trace_0.json").write_text(text)
    diagnosis = analyze([str(folder)])
    assert diagnosis.facts["hang"]["not_reached"]["ranks"] == [2]
    assert any("trace_0.json" in note for note in diagnosis.notes)


def test_a_trace_with_a_dump_s_keys_is_no_dump(tmp_path):
    """torch.profiler writes pg_config and nccl_version, too, and people name the files by rank."""
    job = {
        "backend": "nccl",
        "rank": 0,
        "world_size": 2,
        "pg_config": [{"pg_name": "0"}],
        "nccl_version": "2.27.5",
    }
    content = {"schemaVersion": 1, "distributedInfo": job, "traceEvents": []}
    (tmp_path / "rank0.json").write_text(json.dumps(content))
    assert not find_dumps([str(tmp_path)]).files


def test_what_is_named_as_a_dump_and_is_none_costs_a_sentence(tmp_path):
    folder = Path(write(tmp_path, replace(data_parallel(8), host_stops={3: 10})))
    for rank in (5, 6):
        (folder / f"_dump_{rank}").unlink()
    os.mkfifo(folder / "_dump_5")
    (folder / "_dump_6").symlink_to("nowhere")
    (folder / "_dump_-1").write_bytes((folder / "_dump_1").read_bytes())
    verdict = of_dumps(find_dumps([str(folder)]))
    assert verdict.facts.not_reached.ranks == [3]
    for rank in (5, 6):
        assert any(f"_dump_{rank} is left out" in note for note in verdict.notes)
    assert not any("several" in note for note in verdict.notes)


@pytest.mark.parametrize("silent_s", [-5.0, 1e300])
def test_times_that_cannot_be_are_left_out(tmp_path, silent_s):
    run = Stopped(tmp_path / "run").rank(0, "other", []).stall(silent_s=silent_s)
    assert analyze([str(run.path)]).facts["hang"]["since_s"] in (None, 0.0)


def test_a_file_of_brackets_costs_a_sentence_and_no_memory(tmp_path):
    (tmp_path / "rank0.json").write_bytes(b'[{"record_id":1},' + b"[]," * 9_000_000 + b"[]]")
    (tmp_path / "rank1.json").write_bytes(b'[{"record_id":1},' + b"1," * 9_000_000 + b"1]")
    code = (
        "import re; from ddpdoctor.stall import find_dumps\n"
        f"found = find_dumps([{str(tmp_path)!r}])\n"
        "print(*found.notes, sep='\\n'); print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *notes, peak_kb = done.stdout.splitlines()
    assert len(notes) == 2 and all("more values than any recorder writes" in note for note in notes)
    assert int(peak_kb) < 400_000
