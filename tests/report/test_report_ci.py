"""SARIF and JUnit: what code hosts and CI servers read."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import msgspec
import pytest
import samples

from ddpdoctor.report import render_junit, to_sarif, write_junit, write_sarif


def test_sarif_shows_findings_at_their_lines(tmp_path):
    write_sarif(samples.sick(), tmp_path / "ddpdoctor.sarif")
    log = json.loads((tmp_path / "ddpdoctor.sarif").read_text())
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


@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_sarif_of_anything_is_json(name):
    assert msgspec.json.encode(to_sarif(samples.ALL[name]()))


def test_sarif_without_findings_has_no_results():
    assert to_sarif(samples.healthy())["runs"][0]["results"] == []


def test_junit_lists_every_rule(tmp_path):
    write_junit(samples.sick(), tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
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


def test_junit_fails_from_the_severity_asked_for():
    def failures(severity):
        return ElementTree.fromstring(render_junit(samples.sick(), fail_on=severity)).get("failures")

    assert [failures(severity) for severity in ("critical", "warning", "info")] == ["1", "1", "2"]


def test_junit_holds_hostile_text():
    suite = ElementTree.fromstring(render_junit(samples.hostile(), fail_on="info"))
    assert samples.HOSTILE in suite.find("testcase/system-out").text
    evil = msgspec.structs.replace(samples.sick().findings[0], title="a\x00b\x1b")
    assert "a�b�" in render_junit(msgspec.structs.replace(samples.sick(), findings=[evil]))
