"""JSON Schemas of ``diagnosis.json`` and of rule files, for tools and editors."""

from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import DIAGNOSIS_SCHEMA, Diagnosis
from ddpdoctor.diagnose.rule import Common, Rule

PUBLISHED: dict[str, tuple[type[msgspec.Struct], str]] = {
    "diagnosis.json": (Diagnosis, f"diagnosis.json of ddpdoctor, schema {DIAGNOSIS_SCHEMA}"),
    "rule.json": (Rule, "A rule file of ddpdoctor, <family>/<name>.yaml"),
    "common.json": (Common, "common.yaml: what holds for all rules of ddpdoctor's pack"),
}
"""File name → (type, title) of each schema."""


def json_schema(name: str) -> dict[str, Any]:
    """Return one of the :data:`PUBLISHED` schemas (JSON Schema, draft 2020-12)."""
    kind, title = PUBLISHED[name]
    (reference,), components = msgspec.json.schema_components([kind])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **reference,
        "$defs": components,
    }
