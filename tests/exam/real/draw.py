"""Draws a program with its faults from a seed."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import structures, texts
from .compose import HELPER_HEAD, UNIT, Lines, files_of, fill, plant, write
from .kinds import EPOCH_STEPS, KINDS, WITH_ANOTHER, Asked

RECORDED_S = 4.0
TIMED_S, MIN_ROUNDS, MAX_ROUNDS = 5.0, 3, 6
"""Seconds for timing the twin, and numbers of rounds; each round times all variants."""
MAX_UNSURE_S = 20.0
"""Maximum seconds of rounds while the cost of a fault is too uncertain."""
HEALTHY_SHARE, TWO_SHARE = 0.2, 0.2
MIN_SHARE, MAX_SHARE = 0.08, 0.45
HUGE_SHARE = 0.95
STARTING = """\
import time
from switch import amount


def begin(_):
    time.sleep(amount("worker-start"))  #@worker-start
"""
CHORES = ("time.sleep(0.01 if rank == 0 else 0.0)\n", "time.sleep(0.01 if rank == 1 else 0.0)\n")
"""Work of rank 0 before the barrier and of rank 1 after it. Without the barrier they compensate each other."""


@dataclasses.dataclass
class Planned:
    """A fault as drawn, before the program runs."""

    key: str
    kind: str
    ranks: list[int] | None
    rules: tuple[str, ...]
    with_line: bool = True


@dataclasses.dataclass
class Program:
    """A drawn program on disk: its shape, its faults, and their lines."""

    seed: int
    world: int
    shape: dict[str, object]
    faults: list[Planned]
    lines: Lines
    tolerated: tuple[str, ...]
    spawned: bool = False

    def command(self, job: Path) -> list[str]:
        """The command that starts the program in the folder ``job``."""
        if self.spawned:
            return [sys.executable, str(job / "start.py"), str(self.world)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(self.world), str(job / "train.py")]


def program(seed: int, folder: Path, asked: Asked | None = None) -> Program:
    """Write the program of ``seed`` to ``folder``. Properties given by ``asked`` are not drawn."""
    draw = random.Random(f"exam real {seed}")
    drawn = asked is None
    if asked is None:
        kinds = _kinds(draw)
        world = 4 if (os.cpu_count() or 2) >= 8 and draw.random() < 0.5 else 2
        asked = Asked(world=world)
    else:
        kinds = [asked.kind] if asked.kind else []
    world = asked.world
    values, shape = _shape(draw, kinds, asked.shape)
    extras: dict[str, dict[str, object]] = {}
    helpers: dict[str, str] = {}
    faults = [
        _plant_fault(draw, key, kind, shape, values, extras, helpers, asked)
        for key, kind in zip(("a", "b"), kinds, strict=False)
    ]
    if len(faults) == 2 and faults[0].ranks == faults[1].ranks and faults[0].rules == faults[1].rules:
        faults[1].ranks = [
            (rank + 1) % world for rank in faults[0].ranks or []
        ]  # else one finding would be right
        extras[faults[1].key]["ranks"] = faults[1].ranks
    for place, text in asked.places.items():
        values[place] = values.get(place, "") + text
    files = files_of(str(shape["structure"]), str(shape["model"]), str(shape["data"]), values) | helpers
    lines = write(folder, files)
    rounds = (MIN_ROUNDS, MAX_ROUNDS) if kinds or drawn else (0, 0)
    plan = {"extras": extras, "steps": 100, "seconds": RECORDED_S, "timed_s": TIMED_S, "rounds": rounds}
    plan |= {"steady": all(KINDS[kind].steady for kind in kinds), "unsure_s": MAX_UNSURE_S}
    (folder / "plan.json").write_text(json.dumps(plan, indent=1))
    tolerated = tuple({rule for kind in kinds for rule in KINDS[kind].tolerated})
    return Program(seed, world, shape, faults, lines, tolerated, asked.spawned)


def _kinds(draw: random.Random) -> list[str]:
    chance = draw.random()
    if chance < HEALTHY_SHARE:
        return []
    if chance < HEALTHY_SHARE + TWO_SHARE:
        return draw.sample(WITH_ANOTHER, 2)
    return draw.choices(list(KINDS), [kind.weight for kind in KINDS.values()])


SETTINGS = ("", ", gradient_as_bucket_view=True", ", broadcast_buffers=False")
WIDTH_AND_DEPTH = {"mlp": (192, 4), "conv": (16, 3), "transformer": (64, 2), "accelerator": (64, 1)}


def _shape(
    draw: random.Random, kinds: list[str], asked: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, object]]:
    """(Values for the texts, shape of the program). Sizes follow from the step time, for one slow core."""
    fixed = {name: value for kind in kinds for name, value in KINDS[kind].shape.items()} | dict(asked)
    shape: dict[str, Any] = {
        "model": draw.choice(list(texts.MODELS)),
        "structure": draw.choice(list(structures.STRUCTURES)),
        "data": draw.choice(list(texts.DATA)),
        "workers": draw.choice((0, 0, 1, 2)),
        "batch": draw.choice((4, 8, 12, 16)),
        "parts": draw.choice((1, 1, 1, 2, 4)),
        "step_ms": draw.uniform(15, 80),
        "loss_inside": draw.random() < 0.3,
        "optimizers": 2 if draw.random() < 0.25 else 1,
        "by_hand": False,
        "epochs": 3,
    }
    model = str(fixed.get("model", shape["model"]))
    shape["width"], shape["depth"] = WIDTH_AND_DEPTH[model]
    if "buckets" in kinds:
        shape |= {"model": "mlp", "width": 128, "depth": draw.randint(16, 30)}
    if "resync" in kinds:
        shape |= {"model": "mlp", "width": 640, "depth": draw.randint(4, 8), "parts": draw.choice((2, 4))}
    if "barrier" in kinds or "metrics" in kinds:
        shape["parts"] = 1
    if "uneven" in kinds:
        shape["batch"] = draw.choice((12, 16))
    shape |= fixed
    with_another = len(kinds) > 1 and any(kind.startswith("data") for kind in kinds)
    if shape["data"] == "own" or "contended" in kinds or with_another:
        shape["workers"] = 0
    shape.setdefault("size", max(4, round(_sample_size(**shape))))
    named = ("width", "depth", "batch", "workers", "parts", "size", "epochs")
    values = {name: str(shape[name]) for name in named} | {
        "kernel_s": f"{shape['step_ms'] / 3e3 / shape['batch']:.6f}",
        "persistent": ", persistent_workers=True" if shape["workers"] else "",
        "inside": texts.LOSS_INSIDE if shape["loss_inside"] else "",
        "compute": "loss = model(x, y)\n"
        if shape["loss_inside"]
        else "loss = F.cross_entropy(model(x), y)\n",
        "optimizers": texts.OPTIMIZERS[shape["optimizers"]],
        "optimizer": draw.choice(("SGD", "Adam", "AdamW")),
        "settings": draw.choice(SETTINGS),
        "loader": str(shape["data"] != "own"),
        "imports": "",
    }
    if "settings" in shape:
        values["settings"] = shape["settings"]
    if shape["by_hand"]:
        values |= {"setup": texts.BY_HAND, "average": texts.AVERAGE}
    return values, shape


def _sample_size(*, model: str, step_ms: float, batch: int, width: int, depth: int, **_: object) -> float:
    """Sample size of this model for a step of ``step_ms``."""
    if model == "mlp":
        return step_ms * 25e6 / (6 * (64 * width + depth * width**2) * batch)
    if model == "conv":
        return float((step_ms * 12e6 / (54 * width * (width * depth + 3) * batch)) ** 0.5)
    if model == "transformer":
        return step_ms * 12e6 / (48 * width**2 * depth * batch)
    return 0


def _plant_fault(
    draw: random.Random,
    key: str,
    name: str,
    shape: dict[str, object],
    values: dict[str, str],
    extras: dict[str, dict[str, object]],
    helpers: dict[str, str],
    asked: Asked,
) -> Planned:
    """Plant a fault: add its lines to ``values`` and ``helpers``, and its size to ``extras``."""
    kind = KINDS[name]
    ranks = [draw.randrange(asked.world)] if kind.one_rank else None
    if name.startswith("checkpoint"):
        ranks = [0]
    extra: dict[str, object] = {
        "ranks": ranks,
        "share": draw.uniform(MIN_SHARE, MAX_SHARE),
        "every": 1,
        "calls": 1,
        "workers": 0,
        "amount": 1,
        "unit": "fixed",
    }
    rules = kind.rules
    if kind.when:
        extra["when"] = kind.when
    if not kind.sites:
        key = name
        if name == "uneven":
            extra.update(unit="samples", batch=shape["batch"])
        if name == "contended":
            extra["unit"] = "part"
            values["imports"] += "from neighbour import move_in\n"
            values["start"] = 'move_in(amount("contended"), rank)\n'
        if name == "buckets":
            values["settings"] = ', bucket_cap_mb=0.01 if amount("buckets") else 25'
        if name == "huge-model":
            extra["share"] = HUGE_SHARE
            values["width"] = f"(1500 if amount('{name}') else {shape['width']})"
            values["imports"] += "from switch import amount\n"
        if name == "worker-start":
            extra.update(unit="sleep", calls=1 / EPOCH_STEPS)
            values["persistent"] = f", persistent_workers=not amount('{name}'), worker_init_fn=begin"
            values["imports"] += "from starting import begin\n"
            helpers["starting.py"] = STARTING
        extras[key] = extra
        return Planned(key, name, ranks, rules, with_line=name == "worker-start")
    site, snippet = draw.choice(kind.sites), draw.choice(kind.snippets)
    chore = ""
    if name in ("rare", "checkpoint", "checkpoint-barrier", "now-and-then"):
        extra["every"] = draw.randint(8, 14)
        extra["share"] = draw.uniform(MIN_SHARE, MAX_SHARE / 2)
    if site in ("item", "collate"):
        extra["workers"] = shape["workers"]
        if shape["data"] == "own":
            site, rules = "collate", kind.rules_without_loader
        if shape["workers"]:
            snippet = "sleep"
        extra["calls"] = shape["batch"] if site == "item" else 1
    if site in ("forward", "middle", "backward"):
        extra["calls"] = shape["parts"]
    if name in ("barrier", "metrics"):
        values["before"], chore = CHORES
    if name == "checkpoint-barrier":  # all ranks reach the barrier, one of them late
        extra["ranks"] = None
    extra["unit"] = UNIT.get(snippet, snippet)
    in_helper = (
        name not in ("barrier", "checkpoint-barrier")
        and site in ("before", "after", "forward")
        and snippet != "bytes"
        and draw.random() < 0.5
    )
    lines, imports = plant(draw, key, snippet, helpers, in_helper)
    extra["site"] = site
    if asked.noted:
        lines = f'with noted("{key}"):\n{textwrap.indent(lines, "    ")}'
        imports += "from switch import noted\n"
    if site in texts.CAREFUL:
        of_class = texts.CAREFUL[site].replace("@{optimizer}", values["optimizer"])
        careful = fill(of_class, {"lines": lines})
        helpers["careful.py"] = f"{HELPER_HEAD}from switch import amount\n\n\n{careful}"
        lines, imports = "hidden = careful.Careful.apply(hidden)\n", "import careful\n"
        if site == "optimizer":
            lines = ""
            values["optimizers"] = "optimizers = [careful.Careful(model.parameters(), lr=0.001)]\n"
        site = "forward"
    values[site] = values.get(site, "") + lines + chore
    values["imports"] += imports
    if site == "forward":
        values["imports"] += "import json\nimport time\nfrom switch import amount\n"
    extras[key] = extra
    return Planned(key, name, ranks, rules, with_line=name not in ("collection-one", "collection-all"))
