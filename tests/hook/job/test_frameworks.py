"""The versions of the frameworks that a job has imported: only what is there is read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ddpdoctor.hook.job import torch_settings


class Refuses(ModuleType):
    """A module that computes its attributes, and fails to."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_no_module_of_the_job_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("import sys\nsys.executed = True\n__version__ = '9'\n")
    monkeypatch.setattr(sys, "executed", False, raising=False)
    spec = importlib.util.spec_from_file_location("ray", tmp_path / "ray.py")
    assert spec is not None and spec.loader is not None
    loader = spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    loader.exec_module(lazy)
    known = ModuleType("accelerate")
    known.__dict__["__version__"] = "1.2"
    modules = {"ray": lazy, "trl": Refuses("trl"), "accelerate": known, "ignite": object()}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    found = torch_settings()["frameworks"]
    assert not sys.executed
    assert {name: found[name] for name in modules} == {
        "ray": "",
        "trl": "",
        "accelerate": "1.2",
        "ignite": "",
    }


def test_settings_are_read_if_torch_names_no_precision() -> None:
    """It refuses to once the precision of a single backend is set."""
    backend = torch.backends.cuda.matmul
    before = getattr(backend, "fp32_precision", None)
    if before is None:
        pytest.skip("this torch has one precision for all backends")
    try:
        backend.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        found = torch_settings()
    finally:
        backend.fp32_precision = before
    assert found["matmul_precision"] is None and found["torch"] == torch.__version__
