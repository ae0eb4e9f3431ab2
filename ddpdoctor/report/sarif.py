"""Converts a diagnosis to SARIF 2.1.0, so that code hosts show each finding at its line.

Format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.report import words
from ddpdoctor.report.job_view import project_root
from ddpdoctor.rundir.packages import LIBRARY

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"critical": "error", "warning": "warning", "info": "note"}
ROOT = "PROJECT"
"""Id of the base URI of source files, which code hosts resolve to the repository."""


@dataclass(frozen=True)
class _Repository:
    """Mapping of paths to the repository: absolute paths are below ``root``, relative ones get the prefix ``prefix``."""

    root: str | None
    prefix: str


def to_sarif(diagnosis: Diagnosis) -> dict[str, Any]:
    """A SARIF log with one run and one result per finding. Findings without a source line have no location."""
    repository = _repository(diagnosis)
    rules = list({f.rule: f for f in diagnosis.findings}.values())
    driver: dict[str, Any] = {
        "name": "ddpdoctor",
        "rules": [_rule(finding) for finding in rules],
    }
    if diagnosis.tool_version:
        driver["version"] = diagnosis.tool_version
    indices = {finding.rule: index for index, finding in enumerate(rules)}
    base: dict[str, Any] = {"description": {"text": "The folder of the repository."}}
    if repository.root is not None:
        base["uri"] = f"file://{_quoted(repository.root)}/"
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {ROOT: base},
        "results": [
            {**_result(finding, repository, words.per_step(diagnosis)), "ruleIndex": indices[finding.rule]}
            for finding in diagnosis.findings
        ],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _repository(diagnosis: Diagnosis) -> _Repository:
    """The repository's root if it is known, else the common folder of the user's source files."""
    root, inside = project_root(diagnosis), diagnosis.job.folder_in_repository or ""
    if root is None:
        # Paths in a redacted diagnosis are relative to the project's folder.
        return _Repository(None, f"{inside}/" if inside else "")
    if inside and root.endswith(f"/{inside}"):
        root = root.removesuffix(f"/{inside}")
    return _Repository(root, "")


def _rule(finding: Finding) -> dict[str, Any]:
    """The description of a rule, without numbers of this run, because code hosts show it with all findings of the rule."""
    rule: dict[str, Any] = {
        "id": finding.rule,
        "name": "".join(word.capitalize() for word in re.split(r"[^A-Za-z0-9]+", finding.rule)),
        "shortDescription": {"text": finding.question or finding.rule},
    }
    if finding.read_more:
        rule["helpUri"] = finding.read_more
    help_lines = [finding.question]
    help_lines += [f"When this finding can be wrong: {finding.limits}"] if finding.limits else []
    rule["help"] = {"text": "\n\n".join(filter(None, help_lines)) or finding.rule}
    return rule


def _result(finding: Finding, repository: _Repository, unit: str) -> dict[str, Any]:
    lines = [finding.title, finding.explanation]
    if finding.costs_ms_per_step is not None:
        cost = words.milliseconds(finding.costs_ms_per_step) + words.in_parentheses(words.cost_range(finding))
        lines.append(f"It costs {words.cost_prefix(finding)}{cost}{unit}.")
    elif total := words.cost_in_total(finding):
        lines.append(f"It costs {total}.")
    lines += [f"{words.fix_label(fix)}: {fix.title}. {fix.why}" for fix in finding.fixes[:1]]
    properties = {
        "ranks": finding.ranks,
        "costs_ms_per_step": finding.costs_ms_per_step,
        "costs_ms_per_step_range": finding.costs_ms_per_step_range,
        "costs_s": finding.costs_s,
        "speedup_if_fixed": finding.speedup_if_fixed,
    }
    user_places = [where for where in finding.where if not LIBRARY.match(where.file)]
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": LEVELS.get(finding.severity, "note"),
        "message": {"text": "\n\n".join(line for line in lines if line)},
        "locations": [_location(where, repository) for where in user_places],
        "properties": {name: value for name, value in properties.items() if value is not None},
    }
    flows = [_flow(where, repository) for where in user_places if where.callers]
    if flows:
        result["codeFlows"] = flows
    return result


def _flow(where: Where, repository: _Repository) -> dict[str, Any]:
    """The call path to a line, outermost caller first."""
    return {
        "threadFlows": [
            {
                "locations": [
                    {"location": _location(line, repository), "nestingLevel": level}
                    for level, line in enumerate(reversed(where.call_path))
                ]
            }
        ]
    }


def _location(where: CodeLine, repository: _Repository) -> dict[str, Any]:
    artifact: dict[str, Any]
    if repository.root and where.file.startswith(repository.root + "/"):
        artifact = {"uri": _quoted(where.file[len(repository.root) + 1 :]), "uriBaseId": ROOT}
    elif where.file.startswith("/"):
        artifact = {"uri": f"file://{_quoted(where.file)}"}
    else:
        artifact = {"uri": _quoted(repository.prefix + where.file), "uriBaseId": ROOT}
    physical: dict[str, Any] = {"artifactLocation": artifact}
    if where.line > 0:
        physical["region"] = {"startLine": where.line}
        if isinstance(where, Where) and where.text:
            physical["contextRegion"] = {
                "startLine": where.text.first_line,
                "endLine": where.text.first_line + len(where.text.lines) - 1,
                "snippet": {"text": "\n".join(where.text.lines)},
            }
    location: dict[str, Any] = {"physicalLocation": physical}
    if where.function:
        location["logicalLocations"] = [{"name": where.function, "kind": "function"}]
    return location


def _quoted(path: str) -> str:
    """``path`` in a URI. Its bytes that are not UTF-8, which Python reads as surrogates, are quoted as they are."""
    return quote(path, errors="surrogateescape")
