"""A small part of the lab: strong faults that must be named on any machine, and the lab's own parts."""

from __future__ import annotations

import ast
from random import Random

import pytest

from .cases import draw
from .faults import FAULTS, Draw, find
from .planting import HERE, Plant, function_of, right_lines, written
from .running import Job
from .traps import TRAPS
from .trial import Bench, Case

DRAW = Draw(cost_ms=5.0, base_ms=20.0, rank=1, batch=8, steps=100, random=Random(1))


@pytest.mark.torchrun
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "script", "line"),
    [
        ("data-one", "mlp", True),
        ("forward-one", "transformer", True),
        ("log-one", "spawned", True),
    ],
)
def test_a_strong_fault_is_named(tmp_path, fault, script, line):
    pytest.importorskip("torch")
    job = Job(script, 2, 80.0)
    case = Case(f"{fault}/strong", job, seed=1, size="strong", share=0.5, fault=find(fault), rank=1)
    bench = Bench(tmp_path, base_ms=40.0)
    judgement = bench.run(case).judgement
    assert judgement and judgement.right, (judgement, list(tmp_path.iterdir()))
    assert judgement.line in ("line", "function")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.extended
def test_every_fault_can_be_written_into_its_scripts(fault):
    for script in fault.scripts:
        plant = fault.plant(DRAW)
        text = written(script, [plant])
        ast.parse(text)
        assert "# slot" not in text
        assert bool(right_lines(text, plant.here)) == fault.has_line
        if fault.base:
            ast.parse(written(script, [fault.base(DRAW)]))


def test_every_trap_can_be_written():
    for trap in TRAPS:
        ast.parse(written(trap.script, [trap.plant(Random(1))]))


def test_planted_lines_are_known_by_number_and_function():
    text = written("mlp", [Plant({"forward": f"if {{rank}} == 1:\n    time.sleep(1){HERE}"})])
    (line,) = right_lines(text)
    assert text.splitlines()[line - 1] == "            time.sleep(1)  # here"
    assert text.splitlines()[line - 2] == "        if dist.get_rank() == 1:"
    assert function_of(text, line) == "forward"
    with pytest.raises(KeyError, match="no slot nowhere"):
        written("mlp", [Plant({"nowhere": "pass"})])


def test_a_seed_draws_the_same_cases_again_and_another_seed_others():
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert {case.name for case in draw(5)} == {case.name for case in draw(6)}
