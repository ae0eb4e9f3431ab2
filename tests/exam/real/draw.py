"""Draws one program with its faults from a seed."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path

from . import texts
from .compose import Lines, files_of, write
from .extras import UNIT, plant
from .kinds import KINDS, WITH_ANOTHER

RECORDED_S = 4.0
TIMED_S, LEAST_ROUNDS, MOST_ROUNDS = 5.0, 3, 6
"""How long the twin is timed, and how often it is timed with and without each fault in turn."""
HEALTHY_SHARE, TWO_SHARE = 0.2, 0.2
LEAST_SHARE, MOST_SHARE = 0.08, 0.45
CHORES = ("time.sleep(0.01 if rank == 0 else 0.0)\n", "time.sleep(0.01 if rank == 1 else 0.0)\n")
"""Two ranks' chores, one before the barrier and one after: they even out unless the barrier adds them up."""


@dataclasses.dataclass
class Planned:
    """A fault as drawn, before anything ran."""

    key: str
    kind: str
    ranks: list[int] | None
    rules: tuple[str, ...]
    with_line: bool = True


@dataclasses.dataclass
class Program:
    """A drawn program on disk: its shape, its faults, and on which lines they stand."""

    seed: int
    world: int
    shape: dict[str, object]
    faults: list[Planned]
    lines: Lines
    tolerated: tuple[str, ...]


def program(seed: int, folder: Path) -> Program:
    """Writes the program of ``seed`` into ``folder``."""
    draw = random.Random(f"exam real {seed}")
    kinds = _kinds(draw)
    world = 4 if (os.cpu_count() or 2) >= 8 and draw.random() < 0.5 else 2
    values, shape = _shape(draw, kinds)
    extras: dict[str, dict[str, object]] = {}
    helpers: dict[str, str] = {}
    faults = [
        _planted(draw, key, kind, shape, values, extras, helpers, world)
        for key, kind in zip(("a", "b"), kinds, strict=False)
    ]
    if len(faults) == 2 and faults[0].ranks == faults[1].ranks and faults[0].rules == faults[1].rules:
        faults[1].ranks = [
            (rank + 1) % world for rank in faults[0].ranks or []
        ]  # else one finding would be right
        extras[faults[1].key]["ranks"] = faults[1].ranks
    files = files_of(str(shape["structure"]), str(shape["model"]), str(shape["data"]), values) | helpers
    lines = write(folder, files)
    rounds = (LEAST_ROUNDS, MOST_ROUNDS)
    plan = {"extras": extras, "steps": 100, "seconds": RECORDED_S, "timed_s": TIMED_S, "rounds": rounds}
    (folder / "plan.json").write_text(json.dumps(plan, indent=1))
    tolerated = tuple({rule for kind in kinds for rule in KINDS[kind].tolerated})
    return Program(seed, world, shape, faults, lines, tolerated)


def _kinds(draw: random.Random) -> list[str]:
    chance = draw.random()
    if chance < HEALTHY_SHARE:
        return []
    if chance < HEALTHY_SHARE + TWO_SHARE:
        return draw.sample(WITH_ANOTHER, 2)
    return draw.choices(list(KINDS), [kind.weight for kind in KINDS.values()])


def _shape(draw: random.Random, kinds: list[str]) -> tuple[dict[str, str], dict[str, object]]:
    """What the program looks like; sizes come from the step's length, at the pace of one slow core."""
    model = draw.choice(list(texts.MODELS))
    structure, data = draw.choice(list(texts.STRUCTURES)), draw.choice(list(texts.DATA))
    workers, batch = draw.choice((0, 0, 1, 2)), draw.choice((4, 8, 12, 16))
    parts = draw.choice((1, 1, 1, 2, 4))
    step_ms = draw.uniform(15, 80)
    inside, two = draw.random() < 0.3, draw.random() < 0.25
    width, depth = {"mlp": (192, 4), "conv": (16, 3), "transformer": (64, 2)}[model]
    if "buckets" in kinds:
        model, width, depth = "mlp", 128, draw.randint(16, 30)
    if "resync" in kinds:
        model, width, depth, parts = "mlp", 640, draw.randint(4, 8), draw.choice((2, 4))
    if "barrier" in kinds:
        parts = 1
    if "uneven" in kinds:
        batch = draw.choice((12, 16))
    if data == "own":
        workers = 0
    if "contended" in kinds or (len(kinds) > 1 and any(kind.startswith("data") for kind in kinds)):
        workers = 0
    if model == "mlp":
        size = step_ms * 25e6 / (6 * (64 * width + depth * width**2) * batch)
    elif model == "conv":
        size = (step_ms * 12e6 / (54 * width * (width * depth + 3) * batch)) ** 0.5
    else:
        size = step_ms * 12e6 / (48 * width**2 * depth * batch)
    values = {
        "size": str(max(4, round(size))),
        "width": str(width),
        "depth": str(depth),
        "batch": str(batch),
        "workers": str(workers),
        "parts": str(parts),
        "persistent": ", persistent_workers=True" if workers else "",
        "inside": texts.LOSS_INSIDE if inside else "",
        "compute": "loss = model(x, y)\n" if inside else "loss = F.cross_entropy(model(x), y)\n",
        "optimizers": texts.OPTIMIZERS[2 if two else 1],
        "optimizer": draw.choice(("SGD", "Adam", "AdamW")),
        "settings": draw.choice(("", ", gradient_as_bucket_view=True", ", broadcast_buffers=False")),
        "loader": str(data != "own"),
        "imports": "",
    }
    shape: dict[str, object] = {
        "structure": structure,
        "model": model,
        "data": data,
        "workers": workers,
        "batch": batch,
        "parts": parts,
        "loss_inside": inside,
        "optimizers": 2 if two else 1,
        "size": values["size"],
        "depth": depth,
    }
    return values, shape


def _planted(
    draw: random.Random,
    key: str,
    name: str,
    shape: dict[str, object],
    values: dict[str, str],
    extras: dict[str, dict[str, object]],
    helpers: dict[str, str],
    world: int,
) -> Planned:
    """Plants one fault: its lines among ``values`` and ``helpers``, its size among ``extras``."""
    kind = KINDS[name]
    ranks = [draw.randrange(world)] if kind.one_rank else None
    if name == "checkpoint":
        ranks = [0]
    extra: dict[str, object] = {
        "ranks": ranks,
        "share": draw.uniform(LEAST_SHARE, MOST_SHARE),
        "every": 1,
        "calls": 1,
        "workers": 0,
        "amount": 1,
        "unit": "fixed",
    }
    rules = kind.rules
    if not kind.sites:
        key = name
        if name == "uneven":
            extra.update(unit="samples", batch=shape["batch"])
        if name == "contended":
            extra["unit"] = "part"
            values["imports"] += "from neighbour import move_in\n"
            values["neighbour"] = 'move_in(amount("contended"), rank)\n'
        if name == "buckets":
            values["settings"] = ', bucket_cap_mb=0.01 if amount("buckets") else 25'
        extras[key] = extra
        return Planned(key, name, ranks, rules, with_line=False)
    site, snippet = draw.choice(kind.sites), draw.choice(kind.snippets)
    chore = ""
    if name in ("rare", "checkpoint"):
        extra["every"] = draw.randint(8, 14)
        extra["share"] = draw.uniform(LEAST_SHARE, MOST_SHARE / 2)
    if site in ("item", "collate"):
        extra["workers"] = shape["workers"]
        if shape["data"] == "own":
            site, rules = "collate", kind.rules_without_loader
        if shape["workers"]:
            snippet = "sleep"
        extra["calls"] = shape["batch"] if site == "item" else 1
    if site in ("forward", "middle"):
        extra["calls"] = shape["parts"]
    if name == "barrier":
        values["before"], chore = CHORES
    extra["unit"] = UNIT.get(snippet, snippet)
    apart = (
        name != "barrier"
        and site in ("before", "after", "forward")
        and snippet != "bytes"
        and draw.random() < 0.5
    )
    lines, need = plant(draw, key, snippet, helpers, apart)
    values[site] = values.get(site, "") + lines + chore
    values["imports"] += need
    if site == "forward":
        values["imports"] += "import json\nimport time\nfrom switch import amount\n"
    extras[key] = extra
    return Planned(key, name, ranks, rules, with_line=name not in ("collection-one", "collection-all"))
