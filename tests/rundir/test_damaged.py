"""A damaged file of one rank costs what it held, nothing of another rank, and is named."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.cli.main import cli
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir.files import parsed
from ddpdoctor.rundir.liveness import boot_id, pid_namespace
from ddpdoctor.rundir.reader import RunDirectory, UnknownAttemptError
from tests.privileges import as_anybody
from tests.python import unpack

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "slow-data-one-rank"
OPTIONS = Options(cache=False, jobs=1)


@pytest.fixture
def run(tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "run", ignore=shutil.ignore_patterns("trace.json.gz")))


@functools.cache
def whole() -> Diagnosis:
    return analyze(str(FIXTURE), OPTIONS)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_text("")


def garbage(path: Path) -> None:
    path.write_bytes(bytes(i * i % 251 for i in range(3000)))


def foreign(path: Path) -> None:
    path.write_text('{"name": "x"}\n')


@pytest.mark.parametrize(
    ("damage", "words", "rank"),
    [
        (remove, "is missing: how this rank is set up is not known.", 0),
        (empty, "cannot be read (it is empty): how", 0),
        (truncate, "cannot be read (it is cut off): how", 1),
        (unreadable, "cannot be read (Is a directory): how", 1),
        (foreign, "is not the document that ddpdoctor writes there (it names no schema): how", 0),
        (foreign, "is not the document that ddpdoctor writes there (it names no schema): how", 1),
    ],
)
def test_a_rank_without_its_description(tmp_path, damage, words, rank) -> None:
    run = Path(shutil.copytree(FIXTURE, tmp_path / "run"))
    damage(run / "ranks" / f"0000{rank}" / "rank.json")
    found = analyze(str(run), OPTIONS)
    assert found.job.ranks_seen == [0, 1] and found.steps.count == whole().steps.count
    assert [finding.rule for finding in found.findings] == [finding.rule for finding in whole().findings]
    notes = [note for note in found.notes if note.startswith(f"Rank {rank}: {run}") and words in note]
    assert len(notes) == 1 and "rank.json" in notes[0], found.notes
    assert not any("left out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(remove, "is missing"), (empty, "is empty"), (unreadable, "cannot be read"), (truncate, "no step")],
)
def test_a_rank_without_its_steps(run, damage, words) -> None:
    log = run / "ranks" / "00001" / "steps.jsonl"
    damage(log)
    found = analyze(str(run), OPTIONS)
    (note,) = [note for note in found.notes if note.startswith("Rank 1: ") and "steps.jsonl" in note]
    assert words in note and str(log) in note and "1 of 2 ranks could be analyzed" in note
    assert found.job.world_size == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "is missing"),
        (garbage, "holds no step"),
        (empty, "is empty"),
        (unreadable, "cannot be read (Is a directory)"),
        (foreign, "holds no step"),
    ],
)
def test_steps_of_no_rank(tmp_path, damage, words) -> None:
    """Not a word was said of it where traces were left to look at."""
    run = Path(shutil.copytree(FIXTURE, tmp_path / "run"))
    for log in run.glob("ranks/*/steps.jsonl"):
        damage(log)
    found = analyze(str(run), OPTIONS)
    told = [
        note
        for note in found.notes
        if "steps.jsonl" in note and f"{words}: the steps of none of 2 ranks" in note
    ]
    assert len(told) == 1 and told[0].startswith("Ranks 0 and 1: "), found.notes
    assert found.steps.count > 0


def test_steps_of_no_rank_and_no_traces(run) -> None:
    for log in run.glob("ranks/*/steps.jsonl"):
        unreadable(log)
    with pytest.raises(UnusableInput, match=r"steps\.jsonl cannot be read"):
        analyze(str(run), OPTIONS)


def test_a_file_in_place_of_a_ranks_folder(run) -> None:
    folder = run / "ranks" / "00001"
    shutil.rmtree(folder)
    folder.write_text("")
    found = analyze(str(run), OPTIONS)
    assert found.steps.count > 0 and found.job.missing_ranks == [1]
    assert f"Rank 1: {folder} is not a folder: what this rank recorded is lost." in found.notes
    assert not any("left out" in note for note in found.notes)


def test_restarts_of_which_one_description_is_lost(run) -> None:
    """Attempt 1 recorded most; what its rank 1 wrote is told from attempt 0's by the number of the folder."""
    ranks = run / "ranks"
    for rank in ("00000", "00001"):
        shutil.copytree(ranks / rank, ranks / f"{rank}.1")
        info = json.loads((ranks / f"{rank}.1" / "rank.json").read_text())
        (ranks / f"{rank}.1" / "rank.json").write_text(json.dumps({**info, "attempt": 1}))
        truncate(ranks / rank / "steps.jsonl")
    (ranks / "00001.1" / "rank.json").unlink()
    opened = RunDirectory.open(str(run))
    assert [Path(record.path).name for record in opened.ranks] == ["00000.1", "00001.1"]
    assert sum("attempt 2 of 2 are measured" in str(note) for note in opened.notes) == 1
    first = RunDirectory.open(str(run), 1)
    assert [Path(record.path).name for record in first.ranks] == ["00000", "00001"]
    with pytest.raises(UnknownAttemptError, match="there is no attempt 3: the run has 2 attempts"):
        RunDirectory.open(str(run), 3)


@pytest.mark.parametrize(
    ("ended", "pid", "words"),
    [
        (1, None, "killed while the profiler window was open: what the window had recorded is lost."),
        (None, 2**22 + 1, "killed while the profiler window was open: what the window had recorded is lost."),
        (None, 0, "the profiler window was open when this was read: what it"),
        (None, None, "the profiler window was open when this was read: what it"),
    ],
)
def test_ranks_that_were_killed_in_their_window(run, ended, pid, words) -> None:
    """No process has the number 2**22 + 1, 0 stands for one that lives; of a process of another machine nothing is known."""
    pid = os.getpid() if pid == 0 else pid
    here = {"host": socket.gethostname(), "boot": boot_id(), "pid_namespace": pid_namespace()}
    for path in run.glob("ranks/*/rank.json"):
        info = json.loads(path.read_text())
        info |= {"window": {**info["window"], "state": "open"}}
        info |= {"pid": pid, "started_ns": time.time_ns(), **here} if pid else {}
        path.write_text(json.dumps(info))
        (path.parent / "trace.json.gz").unlink(missing_ok=True)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "ended_ns": ended}))
    notes = [note for note in analyze(str(run), OPTIONS).notes if "window was open" in note]
    assert len(notes) == 1 and notes[0].startswith(f"Ranks 0 and 1: {words}")


@pytest.mark.parametrize("damage", [remove, foreign])
def test_a_run_without_any_description(run, damage) -> None:
    for path in run.glob("ranks/*/rank.json"):
        damage(path)
    found = analyze(str(run), OPTIONS)
    assert found.job.ranks_seen == [0, 1]
    assert [f"Rank {rank}: {run}/ranks/0000{rank}/rank.json" in " ".join(found.notes) for rank in (0, 1)]


def test_what_no_description_says_traces_may_say(tmp_path) -> None:
    """A job of one rank whose host work takes half of the step was called healthy once rank.json was lost."""
    run = Path(shutil.copytree(FIXTURE.with_name("rank0-host-work"), tmp_path / "run"))
    shutil.rmtree(run / "ranks" / "00001")
    before = analyze(str(run), OPTIONS)
    remove(run / "ranks" / "00000" / "rank.json")
    found = analyze(str(run), OPTIONS)
    assert before.verdict.rule == "host/python-work" and found.verdict == before.verdict
    assert (found.job.device, found.job.backend) == ("cpu", "gloo")


RUNS = Path(__file__).resolve().parents[1] / "net" / "runs"


@pytest.mark.parametrize("name", ["many-metrics", "data-all-worker"])
def test_what_is_lost_with_all_descriptions_is_read_from_the_steps(tmp_path, name) -> None:
    """Metrics were taken for gradients that the script averages itself, and a rank was accused whose worker works ahead while the
    rank waits for others: that DDP reduces gradients, and that a loader has workers, the steps show."""
    with tarfile.open(RUNS / f"{name}.tar.xz") as packed:
        unpack(packed, tmp_path)
    before = analyze(str(tmp_path), OPTIONS)
    for path in tmp_path.glob("**/rank.json"):
        path.unlink()
    after = analyze(str(tmp_path), OPTIONS)
    assert (after.verdict.rule, after.healthy) == (before.verdict.rule, False)


def test_what_nobody_could_check_passes_no_gate(tmp_path) -> None:
    """On a device the host work of this job on CPUs would be a fault: which it was, only rank.json says."""
    with tarfile.open(RUNS / "healthy-byhand.tar.xz") as packed:
        unpack(packed, tmp_path)
    gate = ["analyze", str(tmp_path), "--no-cache", "--fail-on", "warning"]
    assert CliRunner().invoke(cli, gate).exit_code == 0
    for path in tmp_path.glob("**/rank.json"):
        path.unlink()
    found = analyze(str(tmp_path), OPTIONS)
    assert not found.healthy and found.verdict.rule is None
    assert (
        "step on average may be a problem, but host/python-work lacked data (not measured: the device type)"
        in found.verdict.headline
    )
    done = CliRunner().invoke(cli, gate)
    assert isinstance(done.exception, UnusableInput) or done.exit_code == 2, done.output


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def closed(path: Path) -> None:
    path.chmod(0)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory) -> tuple[Path, Diagnosis]:
    """A run with a file of each kind, and its diagnosis."""
    run = Path(shutil.copytree(FIXTURE, tmp_path_factory.mktemp("whole") / "run"))
    samples = (run / "ranks" / "00001" / "samples.jsonl").read_text().splitlines()
    files = [file for file in (json.loads(line).get("file") for line in samples) if file]  # no file is here
    (run / "hosts" / "host1" / "sources.json").write_text(
        json.dumps({"schema": "ddpdoctor.sources/1", "files": dict.fromkeys(files)})
    )
    ends = [{"rank": rank, "pid": 1 + rank, "code": 0, "in_order": True, "step": 100} for rank in (0, 1)]
    (run / "hosts" / "host1" / "ends.json").write_text(
        json.dumps({"schema": "ddpdoctor.ends/1", "host": "host1", "ends": ends, "oom_kills": 0})
    )
    for rank in (0, 1):
        ending = {"schema": "ddpdoctor.ending/1", "rank": rank, "how": "in_order", "step": 100}
        (run / "ranks" / f"0000{rank}" / "ending.json").write_text(json.dumps(ending))
        (run / "ranks" / f"0000{rank}" / "flight.json").write_text("{}")
    return run, analyze(str(run), OPTIONS)


OF_A_RANK = ("rank.json", "steps.jsonl", "samples.jsonl", "trace.json.gz", "ending.json", "flight.json")
OF_A_HOST = ("telemetry.jsonl", "launch-*.json", "ends.json", "sources.json")


@pytest.mark.parametrize(
    "damage",
    [remove, empty, halved, garbage, foreign, unreadable, fifo, closed],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize(
    "name",
    [
        *(f"ranks/{rank}/{name}" for name in OF_A_RANK for rank in ("00001", "*")),
        *(f"hosts/*/{name}" for name in OF_A_HOST),
        "manifest.json",
    ],
)
def test_what_is_lost_is_named_or_not_needed(all_kinds, tmp_path, name, damage) -> None:
    """Whatever file of a run is damaged, and however: a note names it, or the answer is as before; and no job with a finding is
    called healthy."""
    whole, before = all_kinds
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for path in sorted(run.glob(name)):
        damage(path)
    with as_anybody():
        after = analyze(str(run), OPTIONS)
    assert not after.healthy or before.healthy
    told = [note for note in after.notes if Path(name).name.partition("*")[0] in note]
    assert told or (after.facts, after.findings) == (before.facts, before.findings), after.notes
    assert not any(
        word in note for note in told for word in ("Expecting", "Unterminated", "column", "codec")
    ), told


@pytest.fixture(scope="module")
def one_log_short(all_kinds, tmp_path_factory) -> Diagnosis:
    """Of the run without the steps of the rank that is late."""
    run = Path(shutil.copytree(all_kinds[0], tmp_path_factory.mktemp("short") / "run"))
    remove(run / "ranks" / "00001" / "steps.jsonl")
    return analyze(str(run), OPTIONS)


def test_traces_of_all_ranks_speak_where_a_step_log_is_lost(all_kinds, one_log_short) -> None:
    """All that the others waited for this rank was taken for communication."""
    whole, found = all_kinds[1], one_log_short
    first = (found.findings[0].rule, found.findings[0].ranks)
    assert first == (whole.findings[0].rule, whole.findings[0].ranks) == ("dataloader/one-rank-late", [1])
    assert found.speaker.recording == "window" and "more ranks than have a step log" in found.speaker.why
    assert found.job.ranks_seen == [0, 1] and found.facts["job"]["ranks_seen"] == 2
    assert "allreduce/exposed" not in {finding.rule for finding in found.findings}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_healthy_job_that_lacks_a_step_log_is_healthy(tmp_path, rank) -> None:
    run = Path(shutil.copytree(FIXTURE.with_name("healthy"), tmp_path / "run"))
    remove(run / "ranks" / f"0000{rank}" / "steps.jsonl")
    found = analyze(str(run), OPTIONS)
    assert found.healthy and found.speaker.recording == "window", found.verdict


def test_amounts_of_a_job_that_lacks_a_step_log(all_kinds, one_log_short) -> None:
    """The samples of one rank were called those of the job, and the memory that all ranks share was divided by one."""
    assert all_kinds[1].steps.samples_per_s and one_log_short.steps.samples_per_s is None
    before, after = (each.facts["memory"]["headroom_bytes"] for each in (all_kinds[1], one_log_short))
    assert after == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("damage", [remove, empty, closed, fifo])
def test_without_traces_only_the_recorded_rank_is_spoken_of(run, damage) -> None:
    damage(run / "ranks" / "00001" / "steps.jsonl")
    with as_anybody():
        found = analyze(str(run), OPTIONS)
    assert (found.job.ranks_seen, found.job.missing_ranks) == ([0], [1])
    assert found.facts["job"]["ranks_seen"] == 1 and found.steps.samples_per_s is None
    compared = {"allreduce/communication-bound", "rank-imbalance/host-work", "allreduce/late-rank"}
    assert compared <= {skipped.rule for skipped in found.skipped}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_folder(run, rank) -> None:
    folder = run / "ranks" / f"0000{rank}"
    shutil.rmtree(folder)
    found = analyze(str(run), OPTIONS)
    assert f"Rank {rank}: {folder} is missing: what this rank recorded is not here." in found.notes
    assert found.job.missing_ranks == [rank]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"rank": 0, "wor', "it is cut off"),
        (b'{"rank": 0,', "it is cut off"),
        (b'{"rank": 0', "it is cut off"),
        (b"[1, 2", "it is cut off"),
        (b'{"rank" 0}', "it is no JSON: line 1, character 9"),
        (b'{\n"rank": nothing}', "it is no JSON: line 2, character 9"),
        (b"{} {}", "it is no JSON: line 1, character 4"),
        (b"9" * 5000, "a number in it has too many digits"),
        (b'{"a": "\xff"}', "it is no JSON: it holds bytes that are no text"),
    ],
)
def test_what_is_no_json_is_told_in_plain_words(data, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        parsed(data)
