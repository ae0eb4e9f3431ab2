"""How many backward passes belong to an update of the parameters."""

import math

import pytest

from ddpdoctor.measure.graph import graph_of_logs
from ddpdoctor.measure.steplog import Event, RankLog, Step
from ddpdoctor.rundir.reader import RankRecord

PASS, UPDATE, FORWARD = "bwd", "opt", "fwd"


def passes_per_update(*events):
    """In each of 20 steps."""
    steps = tuple(
        Step(number, 1000 * number, 1000 * number + 1000, events, (), None, None) for number in range(20)
    )
    (found,) = graph_of_logs([RankLog(0, RankRecord("", 0, {"host": "a"}), steps)]).steps
    return float(found.micro_batches[-1])


@pytest.mark.parametrize(
    ("kinds", "passes"),
    [
        ((FORWARD, PASS, UPDATE), 1),
        ((FORWARD, PASS) * 4 + (UPDATE,), 4),
        # A GAN: one batch, two models, an update each.
        ((FORWARD, PASS, UPDATE, FORWARD, PASS, UPDATE), 1),
        # Two optimizers, one for the embeddings and one for the rest, after each four micro-batches.
        ((FORWARD, PASS) * 4 + (UPDATE, UPDATE), 4),
        # Two losses, one update.
        ((FORWARD, PASS, PASS, UPDATE), 2),
        ((FORWARD,), 0),
    ],
)
def test_passes_are_counted_per_update(kinds, passes):
    assert passes_per_update(*(Event(kind, 10 * place, 9) for place, kind in enumerate(kinds))) == passes


def test_an_optimizer_whose_closure_runs_the_pass_ends_after_it():
    assert passes_per_update(Event(UPDATE, 0, 100), Event(FORWARD, 10, 20), Event(PASS, 40, 30)) == 1


def test_of_a_step_of_which_only_the_times_were_kept_nothing_is_known():
    assert math.isnan(passes_per_update())
