"""How the project at hand wants its recordings analysed."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.analysis import Options, Progress
from ddpdoctor.diagnose.config import check_config, load_config
from ddpdoctor.diagnose.load import load_rules


def configured(progress: Progress | None = None, jobs: int | None = None) -> Options:
    """The options that ``ddpdoctor.toml`` or ``pyproject.toml``, here or above, asks for.

    Raises DdpDoctorError where it cannot be read, or names a rule or threshold that does not exist.
    """
    config = load_config(Path.cwd())
    rules = load_rules(config.rules)
    check_config(config, rules)
    return Options(
        loaded_rules=rules,
        thresholds=config.thresholds,
        suppressed=config.suppress,
        jobs=jobs,
        progress=progress,
    )
