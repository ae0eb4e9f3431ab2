"""SARIF and JUnit."""

from __future__ import annotations

import io
import json
import os
from urllib.parse import urlsplit
from xml.etree import ElementTree

import msgspec
import polars as pl
import pytest
import samples
from click.testing import CliRunner
from rich.console import Console

from ddpdoctor.cli.main import cli
from ddpdoctor.diagnose.diagnosis import Verdict
from ddpdoctor.report import words
from ddpdoctor.report.compare import compare
from ddpdoctor.report.json_output import formatted, to_json
from ddpdoctor.report.junit import render_junit
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.redaction import redact
from ddpdoctor.report.runs_output import print_comparison
from ddpdoctor.report.sarif import to_sarif
from ddpdoctor.report.timeline_export import finding_tracks


def test_sarif_shows_findings_at_their_lines():
    log = json.loads(formatted(to_sarif(samples.unhealthy())))
    (run,) = log["runs"]
    first, second = run["results"]
    assert (log["version"], run["tool"]["driver"]["name"]) == ("2.1.0", "ddpdoctor")
    assert (first["level"], second["level"]) == ("error", "note")
    assert first["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "train.py", "uriBaseId": "PROJECT"},
        "region": {"startLine": 57},
        "contextRegion": {
            "startLine": 55,
            "endLine": 57,
            "snippet": {"text": "def main(loader):\n    model.train()\n    for batch in loader:"},
        },
    }
    (flow,) = first["codeFlows"]
    told = [place["location"]["physicalLocation"] for place in flow["threadFlows"][0]["locations"]]
    assert [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in told] == [
        ("start.py", 9),
        ("train.py", 57),
    ]
    assert "codeFlows" not in second
    assert {result["ruleId"] for result in run["results"]} == {
        rule["id"] for rule in run["tool"]["driver"]["rules"]
    }
    assert first["properties"]["ranks"] == [1] and "ranks" not in second["properties"]


def artifacts(value):
    """All places of files in a log."""
    if isinstance(value, dict):
        found = [value["artifactLocation"]] if "artifactLocation" in value else []
        return found + [place for item in value.values() for place in artifacts(item)]
    return [place for item in value for place in artifacts(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_sarif_follows_the_schema_of_code_hosts(name):
    """What code hosts ask for, beyond what the standard's schema says."""
    log = msgspec.json.decode(msgspec.json.encode(to_sarif(samples.ALL[name]())))
    (run,) = log["runs"]
    driver, bases = run["tool"]["driver"], run["originalUriBaseIds"]
    assert all(base.get("uri", "file:///").endswith("/") for base in bases.values())
    for rule in driver["rules"]:
        assert urlsplit(rule.get("helpUri", "https:")).scheme == "https" and rule["name"] != rule["id"]
        assert rule["shortDescription"]["text"] and rule["help"]["text"]
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] and result["message"]["text"]
    for place in artifacts(run["results"]):
        relative = not urlsplit(place["uri"]).scheme
        assert relative == ("uriBaseId" in place) and not place["uri"].startswith("/")
        assert not relative or place["uriBaseId"] in bases


def test_the_texts_of_a_rule_are_the_same_in_every_run():
    first = samples.unhealthy().findings[0]
    asked = msgspec.structs.replace(
        first, question="Is one rank late?", read_more="https://docs.example.org/x"
    )
    other = msgspec.structs.replace(asked, title="Rank 7 waits 3 ms", explanation="", costs_ms_per_step=3.0)

    def rules(finding):
        log = to_sarif(msgspec.structs.replace(samples.unhealthy(), findings=[finding]))
        return log["runs"][0]["tool"]["driver"]["rules"]

    assert rules(asked) == rules(other)
    (rule,) = rules(asked)
    assert rule["shortDescription"]["text"] == "Is one rank late?"
    assert rule["helpUri"] == "https://docs.example.org/x"
    assert "helpUri" not in rules(msgspec.structs.replace(first, read_more=None))[0]


def test_a_job_in_a_subfolder_of_its_repository_annotates_the_right_file():
    unhealthy = samples.unhealthy()
    inside = msgspec.structs.replace(unhealthy.job, folder_in_repository="alice/work")
    diagnosis = msgspec.structs.replace(unhealthy, job=inside)

    def first(log):
        (run,) = log["runs"]
        location = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
        return location["uri"], run["originalUriBaseIds"]["PROJECT"].get("uri")

    assert first(to_sarif(unhealthy)) == ("train.py", "file:///home/alice/work/")
    assert first(to_sarif(diagnosis)) == ("alice/work/train.py", "file:///home/")
    redacted = redact(
        msgspec.structs.replace(
            unhealthy, job=msgspec.structs.replace(inside, folder_in_repository="training")
        )
    )
    assert first(to_sarif(redacted)) == ("training/train.py", None)


def test_sarif_has_paths_that_are_not_utf_8(tmp_path):
    """Python reads such bytes as surrogates."""
    unhealthy = samples.unhealthy()
    first = unhealthy.findings[0]
    where = [msgspec.structs.replace(first.where[0], file=os.fsdecode(b"/data/caf\xe9/train.py"))]
    diagnosis = msgspec.structs.replace(unhealthy, findings=[msgspec.structs.replace(first, where=where)])
    log = json.loads(formatted(to_sarif(diagnosis)))
    assert artifacts(log["runs"][0]["results"])[0]["uri"] == "file:///data/caf%E9/train.py"


def test_sarif_without_findings_has_no_results():
    assert to_sarif(samples.healthy())["runs"][0]["results"] == []


def test_junit_lists_every_rule():
    suite = ElementTree.fromstring(render_junit(samples.unhealthy()))
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "skipped": "1",
    }
    failed = suite.find("testcase[@name='one-rank-late']/failure")
    assert (
        failed.get("type") == "critical"
        and "train.py:57 in main ← /home/alice/work/start.py:9" in failed.text
    )


def test_junit_fails_from_the_given_severity():
    def failures(severity):
        return ElementTree.fromstring(render_junit(samples.unhealthy(), fail_on=severity)).get("failures")

    assert [failures(severity) for severity in ("critical", "warning", "info")] == ["1", "1", "2"]


def test_junit_escapes_hostile_text():
    suite = ElementTree.fromstring(render_junit(samples.hostile(), fail_on="info"))
    assert samples.HOSTILE in suite.find("testcase/system-out").text
    evil = msgspec.structs.replace(samples.unhealthy().findings[0], title="a\x00b\x1b")
    assert "a�b�" in render_junit(msgspec.structs.replace(samples.unhealthy(), findings=[evil]))


def test_a_finding_without_a_cost_per_step_is_not_given_one():
    unhealthy = samples.unhealthy()
    first = unhealthy.findings[0]
    costless = msgspec.structs.replace(first, costs_ms_per_step=None, costs_s=None)
    text = render_junit(msgspec.structs.replace(unhealthy, findings=[costless]))
    assert "\nrank 1\n" in text
    unmarked = msgspec.structs.replace(
        unhealthy, findings=[first], facts={**unhealthy.facts, "steps": {"marked": False}}
    )
    assert "\nrank 1, 44.8 ms\n" in render_junit(unmarked)
    (result,) = to_sarif(unmarked)["runs"][0]["results"]
    assert "It costs 44.8 ms" in result["message"]["text"] and "per step." not in result["message"]["text"]


def test_junit_and_fail_on_agree(tmp_path):
    (tmp_path / "d.json").write_bytes(to_json(samples.unhealthy()))
    for severity, code, failures in (("critical", 1, "1"), ("info", 1, "2")):
        written = tmp_path / f"{severity}.xml"
        done = CliRunner().invoke(
            cli, ["analyze", str(tmp_path / "d.json"), "--fail-on", severity, "--junit", str(written)]
        )
        assert (done.exit_code, ElementTree.parse(written).getroot().get("failures")) == (code, failures)


@pytest.mark.parametrize(("end", "told"), samples.NOT_ENDED.items())
def test_a_job_that_has_not_ended_does_not_pass(tmp_path, end, told):
    healthy = samples.healthy()
    for of_job, passes in ((None, True), ("ended", True), (end, False)):
        job = msgspec.structs.replace(healthy.job, end=of_job)
        (tmp_path / "d.json").write_bytes(to_json(msgspec.structs.replace(healthy, job=job)))
        arguments = ["analyze", str(tmp_path / "d.json"), "--junit", str(tmp_path / "j.xml")]
        assert CliRunner().invoke(cli, arguments).exit_code == 0
        done = CliRunner().invoke(cli, [*arguments, "--fail-on", "warning"])
        errors = [each.get("message") for each in ElementTree.parse(tmp_path / "j.xml").iter("error")]
        assert (done.exit_code == 0) == passes and bool(errors) != passes
    assert f"no result for --fail-on: the job {told};" in str(done.exception)
    assert told in errors[0]


@pytest.mark.parametrize(("state", "told"), [("failed", "failed"), ("hangs", "hung")])
def test_a_hung_or_failed_job_does_not_pass_without_a_finding(tmp_path, state, told):
    """For example if hang/* is suppressed."""
    healthy = samples.healthy()
    stopped = msgspec.structs.replace(healthy, facts={**healthy.facts, "hang": {"state": state}})
    (tmp_path / "d.json").write_bytes(to_json(stopped))
    done = CliRunner().invoke(cli, ["analyze", str(tmp_path / "d.json"), "--fail-on", "warning"])
    assert f"no result for --fail-on: the job {told};" in str(done.exception)


def test_a_diagnosis_without_a_verdict_does_not_pass(tmp_path):
    untold = msgspec.structs.replace(
        samples.healthy(),
        healthy=False,
        verdict=Verdict(None, "Cannot tell: no training steps were measured."),
    )
    (tmp_path / "d.json").write_bytes(to_json(untold))
    done = CliRunner().invoke(cli, ["analyze", str(tmp_path / "d.json"), "--fail-on", "warning"])
    assert str(done.exception) == ("no result for --fail-on: Cannot tell: no training steps were measured.")


def test_ranks_have_the_same_names_in_all_outputs():
    """With two of four ranks recorded, no output says "all ranks"."""
    unhealthy = samples.unhealthy()
    unhealthy = msgspec.structs.replace(
        unhealthy,
        job=msgspec.structs.replace(unhealthy.job, world_size=4),
        findings=[msgspec.structs.replace(each, ranks=None) for each in unhealthy.findings],
    )
    steps = pl.DataFrame({"step": [60], "start_ns": [0], "end_ns": [9]})
    ((_, slices), *_) = finding_tracks(steps, unhealthy.findings, words.all_ranks_label(unhealthy))
    shown = io.StringIO()
    print_comparison(compare(unhealthy, unhealthy), Console(file=shown, width=120))
    for told in (render_junit(unhealthy), render_markdown(unhealthy), str(slices[0].args), shown.getvalue()):
        assert "both recorded" in told and "all ranks" not in told
