"""Healthy jobs that look ill: nothing may be said about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .planting import Plant


@dataclass(frozen=True)
class Trap:
    """A healthy job."""

    name: str
    script: str
    plant: Callable[[Random], Plant] = lambda random: Plant()
    step_ms: float = 30.0
    ranks: int | None = None
    neighbours: int = 0
    """Processes of others that burn a CPU meanwhile."""


_COUNT = "ROUND = [0]\n\n"
_WARM_UP = Plant({"top": _COUNT, "between": "ROUND[0] += 1\nif ROUND[0] < 5:\n    time.sleep(0.3)"})
_EVALUATION = Plant(swaps=(("correct +=", "time.sleep(0.05)\n        correct +="),))
_OWN_PROFILER = Plant(
    {
        "setup": "profiler = torch.profiler.profile()\nprofiler.start()",
        "loop_end": "if step == 20:\n    profiler.stop()",
    }
)


def _one_slow_step(random: Random) -> Plant:
    slow = f"ROUND[0] += 1\nif ROUND[0] == {random.randrange(30, 60)} and {{rank}} == 1:\n    time.sleep(0.6)"
    return Plant({"top": _COUNT, "loop_end": slow})


TRAPS = (
    Trap("healthy-mlp", "mlp"),
    Trap("healthy-cnn", "cnn"),
    Trap("healthy-transformer", "transformer"),
    Trap("healthy-accumulate", "accumulate", step_ms=60.0),
    Trap("healthy-byhand", "byhand", step_ms=60.0),
    Trap("healthy-spawned", "spawned"),
    Trap("trap-warm-up", "mlp", lambda random: _WARM_UP),
    Trap("trap-evaluation", "cnn", lambda random: _EVALUATION),
    Trap("trap-tiny-steps", "mlp", step_ms=0.0),
    Trap("trap-one-slow-step", "spawned", _one_slow_step),
    Trap("trap-single-rank", "transformer", ranks=1),
    Trap("trap-own-profiler", "spawned", lambda random: _OWN_PROFILER),
    Trap("trap-neighbour", "mlp", neighbours=2),
    Trap("trap-item-each-step", "mlp", lambda random: Plant({"loop_end": "loss.item()"})),
)
