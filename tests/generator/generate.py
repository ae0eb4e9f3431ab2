"""From a configuration to trace files and their truth."""

from __future__ import annotations

import os
from pathlib import Path

from .kineto import write_trace
from .model import Config
from .simulate import simulate
from .truth import Truth, tell


def generate(
    config: Config, directory: str | os.PathLike[str], truth_path: str | os.PathLike[str] | None = None
) -> Truth:
    """Writes one trace per rank that is not missing into ``directory`` (made if absent) and returns the
    truth.

    ``truth_path`` also writes the truth as JSON; it must not lie in ``directory``, which analysers read as a
    whole.
    """
    folder = Path(directory)
    if truth_path is not None and Path(truth_path).resolve().parent == folder.resolve():
        raise ValueError("the truth must not be written beside the traces")
    folder.mkdir(parents=True, exist_ok=True)
    simulation = simulate(config)
    files = {
        program.machine.rank: str(write_trace(program, folder))
        for program in simulation.programs
        if program.machine.rank not in config.missing_ranks
    }
    truth = tell(simulation, config, files)
    if truth_path is not None:
        truth.write(truth_path)
    return truth
