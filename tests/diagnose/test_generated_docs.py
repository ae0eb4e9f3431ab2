"""Generated pages that are out of date are found, and the schemas accept what they describe; ``make check`` asks whether they are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnose.diagnosis import Diagnosis, Job, Steps, Verdict
from ddpdoctor.diagnose.load import packaged_folder

GENERATOR = Path(__file__).parents[2] / "docs" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.extended
def test_a_page_that_was_edited_by_hand_is_found(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main([]) == 0
    (tmp_path / "rules" / "gpu" / "gone.md").write_text("no rule of this name", encoding="utf-8")
    (tmp_path / "facts.md").write_text("edited", encoding="utf-8")
    assert generate.main(["--check"]) == 1
    assert generate.stale() == ["facts.md", "rules/gpu/gone.md"]
    assert generate.main([]) == 0
    assert generate.stale() == []


def test_the_schemas_accept_what_they_describe() -> None:
    jsonschema = pytest.importorskip("jsonschema")

    def validator(name: str) -> Any:
        schema = json.loads((GENERATOR.parent / "schema" / name).read_text(encoding="utf-8"))
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    rule = validator("rule.json")
    for file in packaged_folder().glob("*/*.yaml"):
        rule.validate(msgspec.yaml.decode(file.read_bytes()))
    smallest = Diagnosis(healthy=True, verdict=Verdict(None, "Healthy"), job=Job(), steps=Steps())
    diagnosis = validator("diagnosis.json")
    diagnosis.validate(msgspec.to_builtins(smallest))
    with pytest.raises(jsonschema.ValidationError):
        diagnosis.validate({"healthy": "yes"})
