"""The manifests in the recipes are valid for Kubernetes. They are not run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.extended
kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSION = "1.35"
RECIPES = Path(__file__).parent.parent / "docs" / "recipes.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", RECIPES.read_text(encoding="utf-8"), flags=re.DOTALL)
MANIFESTS = [document for block in BLOCKS for document in yaml.safe_load_all(block)]


def of_kubernetes(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifest, or for a custom resource of an operator the pods that the operator would create."""
    if manifest["kind"] != "PyTorchJob":
        return [manifest]
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) <= {"Master", "Worker"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": manifest["metadata"],
            "spec": each["template"]["spec"],
        }
        for each in replicas.values()
    ]


def test_there_are_manifests():
    assert {manifest["kind"] for manifest in MANIFESTS} == {"PyTorchJob", "Job", "Service"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_is_valid(manifest):
    for document in of_kubernetes(manifest):
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_misspelt_field_is_invalid():
    (job,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "Job"]
    job = {**job, "spec": {**job["spec"], "paralelism": 4}}
    with pytest.raises(Exception, match="paralelism"):
        kubernetes_validate.validate(job, VERSION, strict=True)
