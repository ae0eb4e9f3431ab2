"""Ranks of one export of Nsight Systems: each is of its file, whichever of them is read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, load
from ddpdoctor.cli.options import check_outputs
from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.trace import find_traces, load_trace, load_traces
from ddpdoctor.trace.digest import loose_targets, write_digests
from ddpdoctor.written import REPORT
from tests.trace.formats.test_trace_nsight import step_events, trace_of
from tests.trace.nsight_export import export


@pytest.fixture
def path(tmp_path):
    return export(tmp_path / "report.sqlite", [trace_of(tmp_path, rank) for rank in (0, 1)])


def test_what_all_ranks_of_a_file_say_is_said_once_and_by_each_alone(tmp_path):
    traces = [trace_of(tmp_path, rank, step_events(name="")) for rank in (0, 1)]
    path = export(tmp_path / "report.sqlite", traces, command="torchrun --nproc_per_node=2 train.py")
    files = find_traces([path]).files
    unmarked = ": no NVTX range marks the steps"
    for asked, said in (
        (files, f"both processes of {path}{unmarked}"),
        (files[1:], f"{files[1]}{unmarked}"),
    ):
        inputs = load(asked, Options(cache=False, jobs=1))
        notes = [note.text for note in inputs.notes if unmarked in note.text]
        assert len(notes) == 1 and notes[0].startswith(said)


def test_a_rank_is_named_as_it_is_told_and_a_report_beside_the_export_is_no_input(path, tmp_path):
    named = f"{path}#process-1"
    assert find_traces([named]).files == (named,)
    for output, refused in (("old.html", False), ("report.sqlite", True)):
        (tmp_path / "old.html").touch()
        for given in (named, str(tmp_path / "rep*.sqlite")):
            found = (
                contextlib.nullcontext()
                if not refused
                else pytest.raises(DdpDoctorError, match="overwrite an input")
            )
            with found:
                check_outputs([given], {"--html": (tmp_path / output, REPORT)})


def test_a_rank_has_its_share_of_the_bytes(path, monkeypatch):
    """Reading is worth processes of their own from so many bytes on."""
    size = Path(path).stat().st_size
    monkeypatch.setattr("ddpdoctor.trace.load._WORTH_PROCESSES_BYTES", 0.7 * size)
    monkeypatch.setattr("ddpdoctor.trace.processes.read_in_processes", None)
    assert len(load_traces(find_traces([path]).files, jobs=2).traces) == 2


def test_the_deadline_of_a_rank_is_that_of_its_file(path, monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.load._WORTH_PROCESSES_BYTES", 0)
    monkeypatch.setattr("ddpdoctor.trace.processes._MIN_TIMEOUT_S", 0.0)
    monkeypatch.setattr("ddpdoctor.trace.processes._MIN_BYTES_PER_S", 1e12)
    with pytest.raises(UnusableInput, match="did not finish and was given up"):
        load_traces(find_traces([path]).files, jobs=2)


def test_a_file_of_which_a_rank_cannot_be_read_goes_along_with_its_digests(path, tmp_path, monkeypatch):
    files = find_traces([path]).files
    monkeypatch.setattr(
        "ddpdoctor.trace.digest.read_traces",
        lambda files, **more: [(0, load_trace(files[0]), ""), (1, None, "damaged")],
    )
    made = write_digests(loose_targets(files, tmp_path / "out"))
    assert len(made.files) == len(made.failed) == 1
    assert (tmp_path / "out" / "report.sqlite").read_bytes() == Path(path).read_bytes()
