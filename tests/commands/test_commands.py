"""A forked command ends as one with a Python of its own does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from . import ROOT, command

RUN = ROOT / "fixtures" / "slow-data-one-rank"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["nonsense"],
        ["analyze", "nowhere"],
        ["analyze", RUN, "--fail-on", "critical", "--no-cache"],
        ["export", RUN, "--csv", "tables"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_it_says_writes_and_ends_alike(arguments, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "fork").mkdir()
    real = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *map(str, arguments)],
        cwd=tmp_path / "real",
        capture_output=True,
        text=True,
    )
    fork = command(*arguments, cwd=tmp_path / "fork")
    assert (fork.returncode, fork.stdout) == (real.returncode, real.stdout.replace("python -m ", ""))
    assert fork.stderr == real.stderr.replace("python -m ", "")
    written = [
        {file.name: file.read_bytes() for file in sorted((tmp_path / way).rglob("*.*"))}
        for way in ("real", "fork")
    ]
    assert written[0] == written[1]


def test_it_may_not_take_for_ever():
    with pytest.raises(subprocess.TimeoutExpired):
        command("watch", RUN, timeout_s=0.001)
