"""What a trial is to change, and what became of that."""

from __future__ import annotations

import json
from typing import Any, Dict, Optional, Sequence, Set


class Trial:
    """The settings asked for, by name. ``document`` is what rank.json says of the trial."""

    def __init__(self, settings: Dict[str, Any], steps: int, blocks: Sequence[Dict[str, Any]] = ()) -> None:
        self.settings = settings
        self.steps = steps
        """After so many, the job ends."""
        self.blocks = blocks
        """One after the other: ``steps``, and the settings of loaders, ``set``, in them."""
        self.changes: Dict[str, Dict[str, Any]] = {
            name: {"asked": value, "state": "not seen"} for name, value in settings.items()
        }
        self._passed: Set[str] = set()
        """Settings for which nothing was built yet in which they can be set."""
        self.document: Dict[str, Any] = {
            "asked_steps": steps,
            "steps": 0,
            "ended": False,
            "changes": self.changes,
        }
        if blocks:
            self.document["blocks"] = [{"state": "not seen", "why": ""} for _ in blocks]

    def of(self, prefix: str) -> Dict[str, Any]:
        """Settings whose names begin with ``prefix`` and a dot, without those."""
        return {
            name[len(prefix) + 1 :]: value
            for name, value in self.settings.items()
            if name.startswith(prefix + ".")
        }

    def set_to(self, name: str, was: Any, now: Any) -> None:
        """The setting was ``was``, and reads ``now`` since. Where it does not read as asked, it was not applied."""
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

    def pass_over(self, name: str, why: str) -> None:
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


def read(text: str) -> Optional[Trial]:
    """The trial that the launcher's variable asks for; None where it asks for none, or is malformed."""
    try:
        asked = json.loads(text)
        settings, steps, blocks = asked["set"], asked["steps"], asked.get("blocks", [])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(settings, dict) or type(steps) is not int or steps < 1:
        return None
    return Trial(settings, steps, blocks)
