"""SARIF 2.1.0, so that code hosts show each finding at its line.

Format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.report import words
from ddpdoctor.report.redaction import project_root
from ddpdoctor.report.replace import write_whole
from ddpdoctor.rundir.packages import LIBRARY

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"critical": "error", "warning": "warning", "info": "note"}
ROOT = "PROJECT"
"""Name by which source lines refer to the project's folder: code hosts resolve it to the repository."""


def to_sarif(diagnosis: Diagnosis) -> dict[str, Any]:
    """One run with one result per finding; findings without a source line have no location."""
    root = project_root(diagnosis)
    driver: dict[str, Any] = {
        "name": "ddpdoctor",
        "rules": [_rule(finding) for finding in {f.rule: f for f in diagnosis.findings}.values()],
    }
    if diagnosis.tool_version:
        driver["version"] = diagnosis.tool_version
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, root) for finding in diagnosis.findings],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def write_sarif(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write the SARIF log to ``path``, replacing it as a whole. Raises DdpDoctorError where it cannot."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(to_sarif(diagnosis)), indent=1))


def _rule(finding: Finding) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": finding.rule, "shortDescription": {"text": finding.title}}
    if finding.limits:
        rule["help"] = {"text": f"When this is wrong: {finding.limits}"}
    return rule


def _result(finding: Finding, root: str | None) -> dict[str, Any]:
    lines = [finding.title, finding.explanation]
    if finding.costs_ms_per_step is not None:
        cost = words.milliseconds(finding.costs_ms_per_step) + words.aside(words.cost_range(finding))
        lines.append(f"It costs {'at most ' if finding.at_most else ''}{cost} per step.")
    lines += [f"Fix: {fix.title}. {fix.why}" for fix in finding.fixes[:1]]
    properties = {
        "ranks": finding.ranks,
        "costs_ms_per_step": finding.costs_ms_per_step,
        "costs_ms_per_step_range": finding.costs_ms_per_step_range,
        "speedup_if_fixed": finding.speedup_if_fixed,
    }
    own = [where for where in finding.where if not LIBRARY.match(where.file)]
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": LEVELS.get(finding.severity, "note"),
        "message": {"text": "\n\n".join(line for line in lines if line)},
        "locations": [_location(where, root) for where in own],
        "properties": {name: value for name, value in properties.items() if value is not None},
    }
    flows = [_flow(where, root) for where in own if where.callers]
    if flows:
        result["codeFlows"] = flows
    return result


def _flow(where: Where, root: str | None) -> dict[str, Any]:
    """How the program came to a line, in its order: the outermost caller first."""
    return {
        "threadFlows": [
            {
                "locations": [
                    {"location": _location(place, root), "nestingLevel": level}
                    for level, place in enumerate(reversed(where.way))
                ]
            }
        ]
    }


def _location(where: CodeLine, root: str | None) -> dict[str, Any]:
    artifact: dict[str, Any]
    if root and where.file.startswith(root + "/"):
        artifact = {"uri": quote(where.file[len(root) + 1 :]), "uriBaseId": ROOT}
    elif where.file.startswith("/"):
        artifact = {"uri": f"file://{quote(where.file)}"}
    else:
        artifact = {"uri": quote(where.file), "uriBaseId": ROOT}
    place: dict[str, Any] = {"artifactLocation": artifact}
    if where.line > 0:
        place["region"] = {"startLine": where.line}
        if isinstance(where, Where) and where.text:
            place["contextRegion"] = {
                "startLine": where.text.first_line,
                "endLine": where.text.first_line + len(where.text.lines) - 1,
                "snippet": {"text": "\n".join(where.text.lines)},
            }
    location: dict[str, Any] = {"physicalLocation": place}
    if where.function:
        location["logicalLocations"] = [{"name": where.function, "kind": "function"}]
    return location
