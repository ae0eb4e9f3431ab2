"""Redaction of names, paths and arguments."""

from __future__ import annotations

import msgspec
import pytest
import samples
from packed import readable_html

from ddpdoctor.diagnose.diagnosis import Coverage, Finding, TelemetrySeries
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.report.json_output import to_json
from ddpdoctor.report.redaction import redact


def test_the_same_name_gets_the_same_pseudonym():
    unhealthy = samples.unhealthy()
    notes = [
        "node17 is slow",
        "node17.cluster.example.com is slow",
        "see /mnt/acme/secret-set",
        "alice@10.1.2.3",
    ]
    job = msgspec.structs.replace(unhealthy.job, hosts=[*unhealthy.job.hosts, "node1"])
    clean = redact(msgspec.structs.replace(unhealthy, notes=notes, job=job))
    assert clean.job.hosts == ["host-1", "host-2"]
    assert clean.ranks[0].host == clean.telemetry[0].source == "host-1"
    assert clean.notes[:2] == ["host-1 is slow", "host-1 is slow"]
    assert clean.notes[2] == f"see {clean.job.command[4]}" or clean.notes[2].startswith("see path-")
    assert clean.notes[3] == "user-1@address-1"


def test_useful_values_stay():
    clean = redact(samples.unhealthy())
    assert clean.job.command[0] == "torchrun" and "train.py" in clean.job.command
    assert clean.findings[0].where[0] == Where(
        "train.py", 57, "main", 0.98, callers=(CodeLine("start.py", 9, "<module>"),)
    )
    assert clean.findings[0].where[1].file == "data/set.py"
    assert clean.findings[0].fixes[0].docs[0] == "https://docs.pytorch.org/docs/stable/data.html"
    assert clean.job.environment["OMP_NUM_THREADS"] == "1"
    assert clean.series == samples.unhealthy().series


def test_paths_are_relative_to_the_project_or_the_library():
    files = [
        "/home/bob/proj/main.py",
        "/home/bob/proj/data/load.py",
        "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py",
        "/usr/lib/python3.11/threading.py",
    ]
    finding = Finding(
        rule="a/b",
        severity="info",
        title="t",
        coverage=Coverage(1, 1),
        where=[Where(file, 1, "f") for file in files],
    )
    clean = redact(
        msgspec.structs.replace(samples.minimal(), findings=[finding], notes=["/home/bob/other/x.bin"])
    )
    assert [where.file for where in clean.findings[0].where] == [
        "main.py",
        "data/load.py",
        "site-packages/torch/nn/modules/module.py",
        "lib/python3.11/threading.py",
    ]
    assert "bob" not in clean.notes[0] and clean.notes[0].startswith("path-")


def test_urls_and_fractions_are_not_paths():
    note = "See https://pytorch.org/docs/stable: 3/4 of it, tokens/s, and/or 1.2 ms"
    assert redact(msgspec.structs.replace(samples.unhealthy(), notes=[note])).notes == [note]


@pytest.mark.parametrize("part", ["GPU 3", "rank 12"])
def test_the_part_of_a_host_in_a_series_name_stays(part):
    host = samples.unhealthy().job.hosts[0]
    series = [TelemetrySeries(source=f"{host} {part}", field="f", unit="bytes", t_s=[0, 1], values=[1, 2])]
    clean = redact(msgspec.structs.replace(samples.unhealthy(), telemetry=series))
    assert clean.telemetry[0].source == f"host-1 {part}"


def test_a_diagnosis_without_names_is_unchanged():
    assert redact(samples.minimal()) == samples.minimal()


def test_a_repeated_argument_is_replaced_everywhere():
    job = msgspec.structs.replace(
        samples.unhealthy().job, command=["torchrun", "train.py", "--name=project-falcon", "--lr", "0.1"]
    )
    clean = redact(
        msgspec.structs.replace(samples.unhealthy(), job=job, notes=["project-falcon wrote 0.1 GB"])
    )
    assert clean.job.command == ["torchrun", "train.py", "argument-1", "argument-2", "argument-3"]
    assert clean.notes == ["argument-1 wrote 0.1 GB"]


@pytest.mark.parametrize(
    ("source", "note", "said"),
    [
        ("home/alice/run", "home/alice/run/ranks/00000 is missing.", "path-1/ranks/00000 is missing."),
        ("./home/alice/run/", "home/alice/run/ranks/00000 is missing.", "path-1/ranks/00000 is missing."),
        ("../alice/run", "see ../alice/run: nothing", "see path-1: nothing"),
        ("alice/*/rank*.json", "alice/rank1.json is empty.", "path-1/rank1.json is empty."),
        ("alice-run", "alice-run/manifest.json is missing.", "path-1/manifest.json is missing."),
        (
            "run",
            "the run alone is slow, run/x and rerun/x too",
            "the run alone is slow, path-1/x and rerun/x too",
        ),
    ],
)
def test_relative_input_paths_are_replaced(source, note, said):
    clean = redact(msgspec.structs.replace(samples.healthy(), source=[source], notes=[note]))
    assert clean.notes == [said]
    assert "alice" not in to_json(clean).decode() and "alice" not in readable_html(clean)
