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
        """Number of steps after which the job ends."""
        self.blocks = blocks
        """Successive blocks: ``steps``, and the loader settings for them, ``set``."""
        self.changes: dict[str, dict[str, Any]] = {
            name: {"asked": value, "state": "not seen"} for name, value in settings.items()
        }
        self._not_applied: set[str] = set()
        """Settings that did not apply to any object constructed so far."""
        self.document: dict[str, Any] = {
            "asked_steps": steps,
            "steps": 0,
            "ended": False,
            "changes": self.changes,
        }
        if blocks:
            self.document["blocks"] = [{"state": "not seen", "why": ""} for _ in blocks]

    def of(self, prefix: str) -> dict[str, Any]:
        """Settings whose names begin with ``prefix`` and a dot, with that removed."""
        return {
            name[len(prefix) + 1 :]: value
            for name, value in self.settings.items()
            if name.startswith(prefix + ".")
        }

    def set_to(self, name: str, was: Any, now: Any) -> None:
        """Note that the setting was ``was`` and is now ``now``. If that differs from the request, the change was not applied."""
        change = self.changes[name]
        if name in self._not_applied:
            self._not_applied.remove(name)
            del change["why"]
        elif change["state"] == "refused":
            return
        taken = _same(now, change["asked"])
        change.setdefault("was", _plain(was))
        change.update(state="applied" if taken else "refused", now=_plain(now))
        if not taken:
            change["why"] = f"it still reads {_plain(now)}"

    def refuse(self, name: str, why: str) -> None:
        """Note that the setting is left unchanged, and why."""
        self._not_applied.discard(name)
        self.changes[name].update(state="refused", why=why)

    def not_applicable(self, name: str, why: str) -> None:
        """Note that the setting does not apply to this object. Counts as a refusal unless it applies to another one: a loader for
        evaluation may have no workers, and one for training some."""
        if self.changes[name]["state"] == "not seen":
            self.refuse(name, why)
            self._not_applied.add(name)


def _same(now: Any, asked: Any) -> bool:
    if isinstance(now, (int, float)) and isinstance(asked, (int, float)):
        return abs(now - asked) <= 1e-6 * max(abs(now), abs(asked))
    return bool(now == asked)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def read(text: str) -> Trial | None:
    """The trial requested by the launcher's variable; None if there is none or it is malformed."""
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
    """Returns "spread" if this rank's processors are the share set by ``_set_affinity``; otherwise their number."""
    mine = sorted(os.sched_getaffinity(0))
    return "spread" if mine == _share.get("of") else str(len(mine))


_share: dict[str, Any] = {}


def _set_affinity(value: Any) -> None:
    """Give each local rank an equal share of the processors, adjacent ones together."""
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
    """Apply the settings after the process group exists. If the script changes one later, that change stays and is reported."""
    for name, (get, change) in _SWITCHES.items():
        if name in trial.settings:
            try:
                was = get()
                change(trial.settings[name])
                trial.set_to(name, was, get())
            except Exception as error:
                trial.refuse(name, f"{type(error).__name__}: {error}")


def read_again(trial: Trial) -> None:
    """Check, at the trial's end, whether the script has changed the settings since."""
    for name, (get, _) in _SWITCHES.items():
        change = trial.changes.get(name)
        if change is not None and change["state"] == "applied":
            try:
                trial.set_to(name, change["was"], get())
            except Exception as error:
                trial.refuse(name, f"{type(error).__name__}: {error}")
