"""The settings and steps that a trial requests, and settings that are switches of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Callable

from ..guard import part
from ..job import job_torch


class Trial:
    """The requested settings, by name. ``document`` is the ``trial`` field of rank.json."""

    def __init__(self, settings: dict[str, Any], steps: int, blocks: Sequence[dict[str, Any]] = ()) -> None:
        self.settings = settings
        self.steps = steps
        """After so many, the job ends."""
        self.blocks = blocks
        """One after the other: ``steps``, and the settings of loaders, ``set``, in them."""
        self.changes: dict[str, dict[str, Any]] = {
            name: {"asked": value, "state": "not seen"} for name, value in settings.items()
        }
        self._passed: set[str] = set()
        """Settings for which nothing was built yet in which they can be set."""
        self.document: dict[str, Any] = {
            "asked_steps": steps,
            "steps": 0,
            "ended": False,
            "changes": self.changes,
        }
        if blocks:
            self.document["blocks"] = [{"state": "not seen", "why": ""} for _ in blocks]

    def of(self, prefix: str) -> dict[str, Any]:
        """Settings whose names begin with ``prefix`` and a dot, without those."""
        return {
            name[len(prefix) + 1 :]: value
            for name, value in self.settings.items()
            if name.startswith(prefix + ".")
        }

    def set_to(self, name: str, was: Any, now: Any) -> None:
        """Note that the setting was ``was`` and is ``now``. If it differs from the request, it was not applied."""
        change = self.changes[name]
        if name in self._passed:
            self._passed.remove(name)
            del change["why"]
        elif change["state"] == "refused":
            return
        taken = _same(now, change["asked"])
        change.setdefault("was", _plain(was))
        change.update(state="applied" if taken else "refused", now=_plain(now))
        if not taken:
            change["why"] = f"it still reads {_plain(now)}"

    def refuse(self, name: str, why: str) -> None:
        """The setting is left as the job has it."""
        self._passed.discard(name)
        self.changes[name].update(state="refused", why=why)

    def not_applicable(self, name: str, why: str) -> None:
        """There is nothing to set in this thing; it is a refusal unless there is in another one, as with a loader for evaluation
        that has no workers beside one for training that has some."""
        if self.changes[name]["state"] == "not seen":
            self.refuse(name, why)
            self._passed.add(name)


def _same(now: Any, asked: Any) -> bool:
    if isinstance(now, (int, float)) and isinstance(asked, (int, float)):
        return abs(now - asked) <= 1e-6 * max(abs(now), abs(asked))
    return bool(now == asked)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def read(text: str) -> Trial | None:
    """The trial that the launcher's variable asks for; None where it asks for none, or is malformed."""
    try:
        asked = json.loads(text)
        settings, steps, blocks = asked["set"], asked["steps"], asked.get("blocks", [])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(settings, dict) or type(steps) is not int or steps < 1:
        return None
    return Trial(settings, steps, blocks)


_PART = part("trial")


def _affinity() -> str:
    """ "spread" where this rank's processors are its own share of what the job may use; else their number."""
    mine = sorted(os.sched_getaffinity(0))
    return "spread" if mine == _share.get("of") else str(len(mine))


_share: dict[str, Any] = {}


def _set_affinity(value: Any) -> None:
    """Each local rank gets an equal share of the processors, neighbours together."""
    allowed = sorted(os.sched_getaffinity(0))
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    each = len(allowed) // ranks
    if each < 1:
        raise ValueError(f"{len(allowed)} processors for {ranks} ranks")
    _share["of"] = allowed[rank * each : (rank + 1) * each]
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), _share["of"])


_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch.threads": (
        lambda: job_torch().get_num_threads(),
        lambda value: job_torch().set_num_threads(int(value)),
    ),
    "torch.matmul_precision": (
        lambda: job_torch().get_float32_matmul_precision(),
        lambda value: job_torch().set_float32_matmul_precision(str(value)),
    ),
    "torch.cudnn_benchmark": (
        lambda: bool(job_torch().backends.cudnn.benchmark),
        lambda value: setattr(job_torch().backends.cudnn, "benchmark", bool(value)),
    ),
    "cpu.affinity": (_affinity, _set_affinity),
}
NAMES = tuple(_SWITCHES)


def apply_in_rank(trial: Trial) -> None:
    """Apply the settings once the process group exists. Where the script changes one later, that stays and is
    reported."""
    for name, (get, change) in _SWITCHES.items():
        if name in trial.settings:
            was = get()
            try:
                change(trial.settings[name])
            except Exception as error:
                trial.refuse(name, f"{type(error).__name__}: {error}")
                continue
            trial.set_to(name, was, get())


def read_again(trial: Trial) -> None:
    """At the trial's end, check whether the script has changed them since."""
    for name, (get, _) in _SWITCHES.items():
        change = trial.changes.get(name)
        if change is not None and change["state"] == "applied":
            trial.set_to(name, change["was"], get())
