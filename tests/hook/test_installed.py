"""A hook in an installed package, below ``site-packages``, records the same lines as one in a checkout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ddpdoctor

from .recording import HookOptions, Recorded, forked, run_recorded

pytestmark = [pytest.mark.torchrun]

PACKAGE = Path(ddpdoctor.__file__).parent
FRAMEWORK = """
import torch
import torch.distributed as dist

def fit(step):
    for _ in range(4):
        step()
        dist.all_reduce(torch.ones(1))
"""
JOB = """
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
sys.path.append(sys.argv[1])
from lightning.loop import fit

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
data = TensorDataset(torch.ones(8, 2))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = DataLoader(data, batch_size=2)
evaluation = DataLoader(data, batch_size=4)

def step():
    for (batch,) in evaluation:
        pass
    for (batch,) in training:
        model(batch).sum().backward()
    optimizer.step()

fit(step)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder ``site-packages`` with the code that records, and a framework that many jobs use."""
    packages = tmp_path / "env" / "site-packages"
    for name in ("hook", "rundir"):
        shutil.copytree(
            PACKAGE / name, packages / "ddpdoctor" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for module in PACKAGE.glob("*.py"):
        shutil.copy(module, packages / "ddpdoctor")
    (packages / "lightning").mkdir()
    (packages / "lightning" / "loop.py").write_text(FRAMEWORK)
    return packages


def places(recorded: Recorded) -> dict[str, Any]:
    """File, line and ways through frameworks, for each kind of event and for both loaders."""
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.info(0)["hook"]["errors"] == []
    lines = {line["where"]: line for line in recorded.lines(0) if "where" in line}
    named = {
        kind: {event["w"] for event in recorded.events(0, kind)} for kind in ("bwd", "opt", "coll", "data")
    }
    named |= {loader["batch_size"]: {loader["where"]} for loader in recorded.info(0)["loaders"]}
    return {
        kind: sorted((lines[at]["file"], lines[at]["line"], lines[at].get("through")) for at in numbers)
        for kind, numbers in named.items()
    }


@pytest.mark.parametrize("folder", [".", "env/site-packages/some_trainer"])
def test_lines_are_those_of_the_job_wherever_the_hook_is(tmp_path, installed, monkeypatch, folder) -> None:
    """Also if the job itself is an installed package, and so has no code of the user."""
    script = (tmp_path / folder / "train.py").resolve()
    script.parent.mkdir(exist_ok=True)
    script.write_text(JOB)
    found = []
    for number, site in enumerate((None, str(installed / "ddpdoctor" / "hook" / "site"))):
        if site is not None:
            monkeypatch.setattr("ddpdoctor.hook.environment.SITE", site)
        (tmp_path / str(number)).mkdir()
        command = forked(script, str(installed), ranks=0)
        found.append(places(run_recorded(tmp_path / str(number), command, HookOptions(profile_steps=None))))
    code = [line.strip() for line in JOB.splitlines()]
    loop = [str(installed / "lightning" / "loop.py"), 8, "fit"]
    assert (
        found[1]
        == found[0]
        == {
            "bwd": [(str(script), code.index("model(batch).sum().backward()") + 1, None)],
            "opt": [(str(script), code.index("optimizer.step()") + 1, None)],
            "coll": [(str(script), code.index("fit(step)") + 1, [loop])],
            "data": [
                (str(script), code.index(f"for (batch,) in {name}:") + 1, None)
                for name in ("evaluation", "training")
            ],
            2: [(str(script), code.index("training = DataLoader(data, batch_size=2)") + 1, None)],
            4: [(str(script), code.index("evaluation = DataLoader(data, batch_size=4)") + 1, None)],
        }
    )
