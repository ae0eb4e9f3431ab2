"""Makes the environment in which no test need skip: what `make test-all` runs in. Standard library only.

    python tests/everything.py FOLDER

What cannot be installed here is told in a line each; the tests that need it then skip, and are listed as skipped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = "constraints-all.txt"
NEEDED = ["-e", ".[torch,dev]"]
"""Without these there is no test at all."""
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
    # Its setup imports the torch that is there; what it compiles for its first job is built with ninja.
    ["--no-build-isolation", "deepspeed", "ninja", "setuptools", "wheel"],
    # For the axe.min.js in it; Playwright, which it is made for, is not needed.
    ["--no-deps", "axe-playwright-python"],
)
INSTALLS_WITHIN_S = 900
"""What is optional, each; far above what any takes. It guards against a network that does not answer."""


def main(folder: Path) -> int:
    """0 where ddpdoctor and its development tools are there, with whatever else could be had."""
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
    """Why not; empty where they are there."""
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
