"""Renders a diagnosis as JUnit XML, so that CI servers show each rule as failed, passed or skipped."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.report import words
from ddpdoctor.severities import is_as_severe

INVALID_CHARACTERS = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, not even escaped."""


def render_junit(diagnosis: Diagnosis, *, fail_on: str = "warning") -> str:
    """JUnit XML with one test case per rule. Findings of severity ``fail_on`` or worse are failures, others pass with output. If
    there is no failure but the job did not complete or has no verdict, the additional case ``verdict`` is an error."""
    suite = ElementTree.Element("testsuite", name="ddpdoctor")
    failures = 0
    for finding in diagnosis.findings:
        case = _case(suite, finding.rule)
        failed = is_as_severe(finding.severity, fail_on)
        failures += failed
        element = ElementTree.SubElement(case, "failure" if failed else "system-out")
        if failed:
            element.set("message", _valid_xml(finding.title))
            element.set("type", finding.severity)
        element.text = _valid_xml(_text(finding, diagnosis))
    for rule in diagnosis.checked:
        _case(suite, rule.rule)
    for skipped in diagnosis.skipped:
        ElementTree.SubElement(_case(suite, skipped.rule), "skipped", message=_valid_xml(skipped.why))
    why_not_passed = None if failures else words.why_not_passed(diagnosis)
    if why_not_passed is not None:
        case = _case(suite, "verdict")
        ElementTree.SubElement(case, "error", message=_valid_xml(f"No result: {why_not_passed}."))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    suite.set("skipped", str(len(diagnosis.skipped)))
    suite.set("errors", str(int(why_not_passed is not None)))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, rule: str) -> ElementTree.Element:
    family, _, name = _valid_xml(rule).rpartition("/")
    return ElementTree.SubElement(suite, "testcase", classname=f"ddpdoctor.{family or 'rules'}", name=name)


def _text(finding: Finding, diagnosis: Diagnosis) -> str:
    ranks = words.rank_names(finding.ranks, words.all_ranks_label(diagnosis))
    cost = words.cost_in_total(finding)
    if finding.costs_ms_per_step is not None:
        cost = words.milliseconds(finding.costs_ms_per_step) + words.per_step(diagnosis)
    lines = [
        finding.title,
        ", ".join(filter(None, (ranks, cost))),
        *(
            " ← ".join(f"{one.file}:{one.line} in {one.function}" for one in where.call_path)
            for where in finding.where
        ),
        *(f"{words.fix_label(fix)}: {fix.title}" for fix in finding.fixes),
    ]
    return "\n".join(lines)


def _valid_xml(text: str) -> str:
    return INVALID_CHARACTERS.sub("�", text)
