"""The stub driver library, compiled once, and a way to run code against it through the real NVML bindings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).with_name("nvml_stub.c")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory):
    """``stub_library(*flags)``: a folder with a ``libnvidia-ml.so.1`` compiled with these ``-D`` flags."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stub NVML library")
    built = {}

    def build(*flags):
        if flags not in built:
            folder = tmp_path_factory.mktemp("nvml")
            target = folder / "libnvidia-ml.so.1"
            subprocess.run([compiler, "-shared", "-fPIC", "-w", *flags, "-o", target, STUB], check=True)
            built[flags] = folder
        return built[flags]

    return build


@pytest.fixture
def run_with_driver(tmp_path):
    """``run(library_folder, code)``: what ``code`` leaves in ``result``."""
    control = tmp_path / "control"
    control.mkdir()

    def run(library, code):
        program = (
            "import json, os, sys, time\nfrom pathlib import Path\n"
            "from ddpdoctor.telemetry.nvml import NvmlSampler\n"
            "control = Path(os.environ['NVML_STUB_CONTROL'])\n"
            f"{code}\nprint(json.dumps(result))\n"
        )
        environment = {**os.environ, "NVML_STUB_CONTROL": str(control), "PYTHONPATH": str(ROOT)}
        environment["LD_LIBRARY_PATH"] = str(library)
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    run.control = control
    return run
