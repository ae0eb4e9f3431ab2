"""Makes the environment of `make test-all`, with all optional packages, so that no test is skipped. Uses the standard library only.

    python tests/everything.py FOLDER

Packages that cannot be installed are reported in a line each. The tests that need them are skipped and listed as skipped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = "constraints-all.txt"
NEEDED = ["-e", ".[torch,dev]"]
"""Packages without which no test can run."""
OPTIONAL = (
    ["HolisticTraceAnalysis", "pandas<3"],
    ["plotly"],
    ["dask[distributed]"],
    ["ray[train]"],
    ["accelerate"],
    ["lightning"],
    ["transformers", "accelerate"],
    ["trl"],
    ["pytorch-ignite"],
    ["mmengine"],
    ["mpich"],
    ["tensorboard"],
    ["wandb"],
    ["mlflow"],
    ["isal"],
    ["kubernetes-validate"],
    # Its setup imports the installed torch. It compiles extensions with ninja in its first job.
    ["--no-build-isolation", "deepspeed", "ninja", "setuptools", "wheel"],
    # Only for its axe.min.js; Playwright is not needed.
    ["--no-deps", "axe-playwright-python"],
)
INSTALLS_WITHIN_S = 900
"""Time limit per optional package, much longer than any takes, in case the network does not respond."""


def main(folder: Path) -> int:
    """Returns 0 if ddpdoctor and its development tools are installed, regardless of the optional packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if why := _not_installed(python, NEEDED, within_s=None):
        print(f"{' '.join(NEEDED)}: {why}", file=sys.stderr)
        return 1
    missing = {packages[-1]: why for packages in OPTIONAL if (why := _not_installed(python, packages))}
    for name, why in missing.items():
        print(f"could not install {name}, and its tests will skip: {why}", file=sys.stderr)
    if not missing:
        (folder / ".installed").touch()
    return 0


def _not_installed(python: Path, packages: list[str], within_s: float | None = INSTALLS_WITHIN_S) -> str:
    """Install ``packages``. Returns why that failed; empty on success."""
    command = [str(python), "-m", "pip", "install", "-q", "-c", PINNED, *packages]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"pip took more than {within_s} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (errors or [f"pip ended with {done.returncode}"])[-1]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
