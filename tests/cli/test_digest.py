"""``ddpdoctor digest``: small files give the diagnosis that the traces give."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.cli.main import cli
from ddpdoctor.report.json_output import write_json
from tests.commands import command
from tests.privileges import as_anybody
from tests.trace.trace_files import document, events, write

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces"
FIXTURE = ROOT / "fixtures" / "slow-data-one-rank"


def digest(*arguments, cwd=None):
    return command("digest", *arguments, cwd=cwd)


def diagnosis_of(path, tmp_path):
    """diagnosis.json without its time stamp, "PATH" for the path, and digests called what they are made of."""
    write_json(analyze([str(path)], Options(cache=False, jobs=1)), tmp_path / "diagnosis.json")
    text = (tmp_path / "diagnosis.json").read_text().replace(str(path), "PATH")
    found = json.loads(re.sub(r"(-[0-9a-f]{8}\.columns)", "", text).replace("trace.columns", "trace.json.gz"))
    del found["created_ns"]
    return found


def test_a_recorded_run(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(FIXTURE, run)
    (run / "diagnosis.json").write_text("{}")
    done = digest(run, "--out", out)
    assert (done.returncode, done.stderr) == (0, "") and "2 trace(s)" in done.stdout
    names = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    recorded = {file.relative_to(FIXTURE).as_posix() for file in FIXTURE.rglob("*") if file.is_file()}
    assert names == {name.replace("trace.json.gz", "trace.columns") for name in recorded}
    assert diagnosis_of(out, tmp_path) == diagnosis_of(run, tmp_path)


def test_a_digest_is_written_to_the_working_directory_and_not_overwritten(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "runs" / "run")
    first, second = (digest("runs/run/", cwd=tmp_path) for _ in range(2))
    assert first.returncode == 0 and (tmp_path / "run-digest" / "manifest.json").is_file()
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["run"], (
        "nothing stands beside what was read"
    )
    assert second.returncode == 2 and "exists already" in second.stderr
    inside = digest(tmp_path / "runs" / "run", "--out", tmp_path / "runs" / "run" / "small")
    assert inside.returncode == 2 and "is inside the run directory" in inside.stderr
    both = digest(tmp_path / "runs" / "run", tmp_path)
    assert both.returncode == 2 and "one at a time" in both.stderr


def test_an_unusable_trace_is_copied_unchanged(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(FIXTURE, run)
    (run / "ranks" / "00001" / "trace.json.gz").write_bytes(b"\x1f\x8b no gzip")
    done = digest(run, "--out", out)
    assert done.returncode == 0 and "holds no profiler events" in done.stderr
    assert diagnosis_of(out, tmp_path) == diagnosis_of(run, tmp_path)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize("set_", ["torchrec/sst_sleep_pl_dense_after_backward_2", "hta/cpu_only"])
def test_public_traces(tmp_path, set_):
    out = tmp_path / "out"
    assert digest(TRACES / set_, "--out", out).returncode == 0
    files = sorted(out.iterdir())
    assert len(files) == len(list((TRACES / set_).glob("*.json.gz")))
    assert {file.suffix for file in files} == {".columns"}
    assert diagnosis_of(out, tmp_path) == diagnosis_of(TRACES / set_, tmp_path)


def test_hosts_can_share_the_digest_folder(tmp_path):
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
        trace = write(tmp_path / f"host{rank}" / "trace.json", document(events(20), rank=rank))
        for _ in range(2):  # again changes nothing
            assert digest(trace, "--out", tmp_path / "shared").returncode == 0
    assert len(list((tmp_path / "shared").iterdir())) == 2
    assert analyze([str(tmp_path / "shared")], Options(cache=False)).job.ranks_seen == [0, 1]


def test_nothing_to_digest_is_one_sentence(tmp_path):
    bad = tmp_path / "rank0.json"
    bad.write_text('{"traceEvents": []}')
    for path, says in ((tmp_path / "none", "does not exist"), (bad, "No trace could be digested")):
        done = digest(path, "--out", tmp_path / "out")
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_digest_has_nothing_from_links_to_outside_the_run(tmp_path):
    run, out, secret = tmp_path / "run", tmp_path / "out", tmp_path / "home" / "id_ed25519"
    shutil.copytree(FIXTURE, run)
    secret.parent.mkdir()
    secret.write_text("a private key")
    rank = run / "ranks" / "00001"
    (rank / "trace.json.gz").unlink()
    for link in (rank / "trace.json.gz", rank / "flight.json", run / "notes.txt"):
        link.unlink(missing_ok=True)
        link.symlink_to(secret)
    (run / "hosts" / "elsewhere").symlink_to(secret.parent)
    (run / "inside.json").symlink_to(run / "manifest.json")
    os.mkfifo(run / "stuck.json")
    done = digest(run, "--out", out)
    assert done.returncode == 0 and "1 trace(s)" in done.stdout
    notes = done.stderr.splitlines()
    assert len(notes) == 5, notes
    for link in ("ranks/00001/trace.json.gz", "ranks/00001/flight.json", "notes.txt", "hosts/elsewhere"):
        assert f"Note: {run / link} is a link out of the run directory and was skipped." in notes
    assert f"Note: {run / 'stuck.json'} is not a file and was skipped." in notes
    files = [file for file in out.rglob("*") if file.is_file()]
    assert not any(file.is_symlink() or b"private" in file.read_bytes() for file in files)
    assert (out / "inside.json").read_bytes() == (run / "manifest.json").read_bytes()


def test_traces_at_urls_are_digested_into_the_given_folder(tmp_path):
    trace = write(tmp_path / "rank0.json", document(events(20)))
    done = digest(f"file://{trace}", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [file.suffix for file in (tmp_path / "out").rglob("*") if file.is_file()] == [".columns"]
    assert [file.name for file in tmp_path.iterdir()].count("rank0.json") == 1
    assert not list(tmp_path.glob("*.columns"))


def test_a_sparse_file_is_not_copied(tmp_path) -> None:
    run = Path(shutil.copytree(FIXTURE, tmp_path / "run"))
    (run / "manifest.json").write_bytes(b"")
    os.truncate(run / "manifest.json", 1 << 40)
    done = digest(str(run), "--out", str(tmp_path / "out"))
    assert "manifest.json consists of holes" in done.stderr
    left = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert "command" not in left and any("consists of holes" in note for note in left["notes"])


@pytest.mark.parametrize("part", ["ranks", "ranks/00001"])
def test_notes_on_unreadable_parts_are_in_the_digest(tmp_path, part) -> None:
    run, out = Path(shutil.copytree(FIXTURE, tmp_path / "run")), tmp_path / "out"
    (run / part).chmod(0)
    arguments = ["digest", str(run), "--out", str(out)]
    with as_anybody():
        done = CliRunner().invoke(cli, arguments)
    (run / part).chmod(0o700)
    if part == "ranks":
        assert f"{run}: {run}/ranks cannot be read (Permission denied)" in str(done.exception)
        assert not out.exists()
    else:
        said = f"{run}/{part} cannot be read (permission denied) and was skipped."
        assert done.exit_code == 0 and f"Note: {said}" in done.stderr
        assert said in analyze(str(out), Options(cache=False, jobs=1)).notes


def test_ranks_that_are_not_a_folder_are_refused(tmp_path) -> None:
    run, out = Path(shutil.copytree(FIXTURE, tmp_path / "run")), tmp_path / "out"
    shutil.rmtree(run / "ranks")
    (run / "ranks").write_text("")
    done = digest(run, "--out", out)
    assert done.returncode == 2 and f"{run}/ranks cannot be read (Not a directory)" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("manifest", ["", '{"schema": "ddpdoctor.run/1", "notes": ["before codes"]}'])
def test_a_digest_has_notes_with_any_manifest(tmp_path, manifest) -> None:
    run, out = Path(shutil.copytree(FIXTURE, tmp_path / "run")), tmp_path / "out"
    (run / "manifest.json").write_text(manifest)
    os.mkfifo(run / "stuck.json")
    assert digest(run, "--out", out).returncode == 0
    notes = analyze(str(out), Options(cache=False, jobs=1)).notes
    assert f"{run / 'stuck.json'} is not a file and was skipped." in notes
    told = "before codes" if manifest else f"{run / 'manifest.json'} cannot be read"
    assert any(told in note for note in notes), notes


def test_a_digest_next_to_its_traces_keeps_unusable_ones(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    write(traces / "rank0.json", document(events(20), rank=0))
    odd = traces / "rank1.json"
    odd.write_text('{"traceEvents": []}')
    done = digest(traces, "--out", traces)
    assert done.returncode == 0, done.stderr
    assert odd.read_text() == '{"traceEvents": []}'
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank1.json").write_text("mine")
    done = digest(traces, "--out", out)
    assert done.returncode == 2 and "rank1.json is there and is not" in done.stderr
    assert (out / "rank1.json").read_text() == "mine"


def test_a_digest_through_a_link_is_not_written_into_its_run(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(FIXTURE, run)
    (tmp_path / "link").symlink_to(run)
    before = sorted(run.rglob("*"))
    for out in (run / "sub", tmp_path / "link" / "sub", run / "ranks" / "x"):
        for given in (tmp_path / "link", run / "ranks" / "00000" / "trace.json.gz"):
            done = digest(given, "--out", out)
            assert done.returncode == 2 and "is inside the run directory" in done.stderr
    assert sorted(run.rglob("*")) == before


def test_a_digest_that_fails_removes_what_it_wrote_and_nothing_else(tmp_path, monkeypatch):
    from ddpdoctor.errors import DdpDoctorError
    from ddpdoctor.trace.digest import CreatedFiles, copy_run_directory

    records = sys.modules[copy_run_directory.__module__]
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(FIXTURE, run)
    out.mkdir()
    copied = records.shutil.copyfileobj

    def meanwhile(source, target):
        (out / "notes.txt").write_text("put here meanwhile")
        if target.name.endswith("steps.jsonl"):
            raise OSError(28, "No space left on device")
        copied(source, target)

    monkeypatch.setattr(records.shutil, "copyfileobj", meanwhile)
    with pytest.raises(DdpDoctorError, match="no space left"):
        copy_run_directory(str(run), out, CreatedFiles())
    assert [file.name for file in out.iterdir()] == ["notes.txt"]


def test_a_digest_that_was_changed_is_not_replaced(tmp_path):
    trace = write(tmp_path / "rank0.json", document(events(20)))
    assert digest(trace, "--out", tmp_path / "out").returncode == 0
    (made,) = (tmp_path / "out").iterdir()
    made.write_text("mine")
    done = digest(trace, "--out", tmp_path / "out")
    assert done.returncode == 2 and "another file of that name is there" in done.stderr
    assert made.read_text() == "mine"
