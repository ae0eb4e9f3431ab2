"""``python -m tests.generator OUT ...``: writes traces to a directory and prints the truth in short."""

from __future__ import annotations

from pathlib import Path

import click

from .cases import LETTERS, case
from .model import JOB_PLANTS, RANK_PLANTS, Config, HostClock, Plant, When, cpu_job
from .truth import Truth, generate

KINDS = "\n\n".join(f"{kind}: {text}" for kind, text in {**RANK_PLANTS, **JOB_PLANTS}.items())
NUMBERS = {"ms": float, "factor": float, "count": int, "position": float}
WHEN = {"first": int, "last": int, "every": int, "probability": float}


def parse_plant(text: str) -> Plant:
    """``slow_data:ranks=2+3,ms=2,every=4`` -> Plant."""
    kind, _, rest = text.partition(":")
    values, when = {}, {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key == "ranks":
            values[key] = tuple(int(rank) for rank in value.split("+"))
        elif key == "drain":
            values[key] = value not in ("0", "false", "no")
        elif key in NUMBERS:
            values[key] = NUMBERS[key](value)
        elif key in WHEN:
            when[key] = WHEN[key](value)
        else:
            known = ", ".join(("ranks", "drain", *NUMBERS, *WHEN))
            raise click.BadParameter(f"unknown key {key!r} in {text!r}; known: {known}")
    try:
        return Plant(kind, when=When(**when), **values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(epilog=f"Plants:\n\n{KINDS}")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--case", "letter", type=click.Choice(list(LETTERS)), help="A named case instead of a job of your own."
)
@click.option("--world-size", default=4, show_default=True)
@click.option("--ranks-per-host", default=0, help="0: all on one host.")
@click.option("--clock-offset-us", default=0.0, help="Offset of each host's clock against the one before it.")
@click.option("--drift-ppm", default=0.0, help="Drift of every second host's clock.")
@click.option("--steps", default=8, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--backend", type=click.Choice(["nccl", "gloo"]), default="nccl", show_default=True)
@click.option("--plant", "plants", multiple=True, help="For instance slow_data:ranks=2,ms=2,every=4")
@click.option(
    "--truth", "truth_path", type=click.Path(path_type=Path), help="Write the truth as JSON to this file."
)
def main(
    out: Path,
    letter: str | None,
    world_size: int,
    ranks_per_host: int,
    clock_offset_us: float,
    drift_ppm: float,
    steps: int,
    seed: int,
    backend: str,
    plants: tuple[str, ...],
    truth_path: Path | None,
) -> None:
    """Generate the profiler traces of a DDP job into the directory OUT, one file per rank."""
    if letter:
        config = case(letter, world_size, seed, drift_ppm=drift_ppm, steps=steps, backend=backend).config
    else:
        per_host = ranks_per_host or world_size
        sizes = tuple(min(per_host, world_size - first) for first in range(0, world_size, per_host))
        clocks = tuple(
            HostClock(round(host * clock_offset_us * 1000), drift_ppm * (host % 2))
            for host in range(len(sizes))
        )
        chosen = tuple(parse_plant(text) for text in plants)
        config = (cpu_job if backend == "gloo" else Config)(
            world_size=world_size, hosts=sizes, clocks=clocks, steps=steps, seed=seed, plants=chosen
        )
    tell_in_short(generate(config, out, truth_path))


def tell_in_short(truth: Truth) -> None:
    """Prints step time, plants and who made others wait."""
    click.echo(f"{len(truth.files)} traces, mean step {truth.mean_step_us / 1000:.3f} ms")
    for plant in truth.plants:
        cost = f"{plant.cost_us_per_step / 1000:.3f} ms per step ({plant.share:.1%})"
        click.echo(f"{plant.kind}, ranks {plant.ranks or 'all'}: costs {cost}")
    caused = truth.wait_caused_us()
    for rank in sorted(range(len(caused)), key=caused.__getitem__, reverse=True)[:4]:
        click.echo(f"rank {rank} made the others wait {caused[rank] / 1000:.3f} ms in sum")


if __name__ == "__main__":
    main()
