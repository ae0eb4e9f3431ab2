"""Rewords texts of rules for a job of two ranks, one recorded rank, one measured step, or unmarked steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OF_ONE_RANK = ((re.compile(r", median rank\b"), ""),)
_VERBS = {
    "wait": "waits",
    "have": "has",
    "are": "is",
    "do": "does",
    "notice": "notices",
    "need": "needs",
    "take": "takes",
}
_OF_TWO_RANKS = (
    (
        re.compile(r"\b([Aa])ll other ranks wait\b"),
        lambda found: f"{'T' if found[1] == 'A' else 't'}he other rank waits",
    ),
    (re.compile(r"\ball others wait\b"), "the other rank waits"),
    (re.compile(r"\bthe median of the other ranks is\b"), "on the other rank it is"),
    (re.compile(r"\bmedian of the other ranks\b"), "the other rank"),
    (
        re.compile(r"\b(?:than|than on|relative to) the median rank\b"),
        lambda found: found[0].replace("median", "other"),
    ),
    (re.compile(r"\bOther ranks are\b"), "The other rank is"),
    (re.compile(r"\b(delays?) the others\b"), r"\1 the other rank"),
    (
        re.compile(rf"\b([Tt])he other ranks ((?:still |already )?)({'|'.join(_VERBS)})\b"),
        lambda found: f"{found[1]}he other rank {found[2]}{_VERBS[found[3]]}",
    ),
    (re.compile(r"\b([Tt])he other ranks\b"), r"\1he other rank"),
)
_OF_ONE_STEP = ((re.compile(r" on average\b"), ""),)
_OF_RECORDING = (
    (re.compile(r"\bper step\b"), "in the recording"),
    (
        re.compile(r"\b[Aa] step takes\b"),
        lambda found: f"{'T' if found[0][0] == 'A' else 't'}he recording takes",
    ),
    (
        re.compile(r"\b([Aa]) step would\b"),
        lambda found: f"{'T' if found[1] == 'A' else 't'}he recording would",
    ),
    (re.compile(r"(?<!out )\bof the step\b"), "of the recording"),
)


def reworded_for_job(text: str, names: Mapping[str, Any]) -> str:
    """``text`` of a rule, worded for many ranks and steps, reworded for a job of two ranks, one recorded rank, one measured step, or a
    recording without step marks."""
    job, steps = names.get("job") or {}, names.get("steps") or {}
    changes: list[tuple[re.Pattern[str], Any]] = []
    changes += _OF_ONE_RANK if job.get("ranks_seen") == 1 else ()
    changes += _OF_TWO_RANKS if job.get("world_size") == 2 else ()
    changes += _OF_ONE_STEP if steps.get("measured") == 1 else ()
    changes += _OF_RECORDING if steps.get("marked") is False else ()
    for pattern, instead in changes:
        text = pattern.sub(instead, text)
    return text
