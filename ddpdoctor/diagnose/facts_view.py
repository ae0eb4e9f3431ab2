"""The facts as rules use them: nested dicts, dotted paths, units and documentation."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ddpdoctor.diagnose.rule_cache import CachedResult
from ddpdoctor.measure import facts as facts_module
from ddpdoctor.measure import runfacts, taxonomy
from ddpdoctor.measure.facts import Cost, Facts
from ddpdoctor.measure.places import Where

_DOCUMENTED = tuple(str(module.__file__) for module in (facts_module, runfacts, taxonomy))
_FACTS_OF = {"LateCause": "LateFacts", "SharedCause": "SharedFacts"}
"""Enumeration of causes → the struct with one fact per cause."""

_CLAUSE = re.compile(r"(?:[^():;.]|\([^()]*\)|[:;.](?=\S))*")
"""Text up to a colon, semicolon or full stop, except those in parentheses or inside a word, as in ``torch.save``."""

UNITS = (
    ("_bytes_per_s", "bytes/s"),
    ("_gb_per_s", "GB/s"),
    ("_per_s", "1/s"),
    ("ms_per_step", "ms per step"),
    ("bytes_per_step", "bytes per step"),
    ("bytes_per_hour", "bytes per hour"),
    ("_bytes", "bytes"),
    ("_ms", "ms"),
    ("_us", "µs"),
    ("_share", "share"),
    ("_percent", "%"),
    ("_celsius", "°C"),
    ("_per_step", "per step"),
    ("speedup", "x"),
    ("_steps", "steps"),
    ("_hours", "hours"),
    ("_s", "s"),
)
"""Suffix of a fact's name → unit; the first match counts."""


def tree(facts: Facts) -> dict[str, Any]:
    """Return all facts as nested dicts and lists of plain values; absent ones are None."""
    plain: dict[str, Any] = msgspec.to_builtins(facts)
    return plain


def as_cel(value: Any) -> Any:
    """Return a copy with every number as float: CEL does not mix int and double in arithmetic."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return float(value)
    if isinstance(value, Mapping):
        return {key: as_cel(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [as_cel(entry) for entry in value]
    return value


def lines_at(tree: Mapping[str, Any], path: str | None) -> list[Any]:
    """The source lines in the fact at ``path``, which has one or several; [] without a path."""
    found = lookup(tree, path) if path else None
    return found if isinstance(found, list) else [found] if found else []


def lookup(facts: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None if it or a parent is absent."""
    value: Any = facts
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


_MEASUREMENTS = {
    "arrivals": "arrival times at collectives",
    "breakdown": "the critical path",
    "buckets": "DDP's buckets",
    "communication": "transfer times of collectives, from all their ranks",
    "communication.best_bus_gb_per_s": "transfer times by message size",
    "communication.bus_gb_per_s": "transfer times by message size",
    "communication.latency_us": "transfer times by message size",
    "ddp": "DDP's options and parameters",
    "gpu": "GPU kernels, from a profiler window",
    "gpu.error_ranks": "NVML samples",
    "gpu.memory_used_share": "NVML samples",
    "gpu.narrow_link_ranks": "NVML samples",
    "gpu.throttled_ranks": "NVML samples",
    "host": "host load",
    "host.run_delay_share": "CPU wait of training threads",
    "job.backend": "the backend",
    "job.data_parallel": "whether the job uses DataParallel",
    "job.device": "the device type",
    "loader": "DataLoader waits",
    "memory": "memory use over the run",
    "run": "start and end times of the run",
}
"""Path of a fact or group of facts → what must be measured for it."""


def missing_measurements(paths: Sequence[str]) -> str:
    """What must be measured for these facts, in words: "memory use over the run, NVML samples"."""
    return ", ".join(
        dict.fromkeys(
            _MEASUREMENTS.get(path) or _MEASUREMENTS.get(path.partition(".")[0], path) for path in paths
        )
    )


def range_ms(cost: dict[str, Any] | None) -> list[float] | None:
    """Interval [low, high] of a cost, ms per step; None without an interval."""
    if cost is None or cost["low_ms_per_step"] is None or cost["high_ms_per_step"] is None:
        return None
    return [cost["low_ms_per_step"], cost["high_ms_per_step"]]


def speedups(cost: dict[str, Any] | None) -> list[float] | None:
    """Interval [low, high] of the speedup, for the step time that the cost's share refers to; None if the cost has no interval, or if the
    upper end of the interval is the whole step."""
    ends_ms = range_ms(cost)
    if cost is None or ends_ms is None or not cost["share"]:
        return None
    step_ms = cost["ms_per_step"] / cost["share"]
    return [step_ms / (step_ms - end_ms) for end_ms in ends_ms] if ends_ms[1] < step_ms else None


def unit_of(path: str) -> str:
    """Return the unit in a fact's name; "" if it has none."""
    name = path.rpartition(".")[2]
    if name == "share":
        return "share"
    return next((unit for end, unit in UNITS if name.endswith(end)), "")


def _fields_on_path(path: str) -> list[tuple[Any, str, Any]]:
    """(struct, field, the field's type) at each name of a dotted path; [] if there is no such fact."""
    kind: Any = Facts
    way = []
    for name in path.split("."):
        is_dict = typing.get_origin(kind) is dict
        fields = {name: typing.get_args(kind)[1]} if is_dict else fields_of(kind)
        if name not in fields:
            return []
        way.append((kind, name, fields[name]))
        kind = fields[name]
    return way


def is_fact(path: str) -> bool:
    """Whether the facts have a field at this dotted path."""
    return bool(_fields_on_path(path))


def is_cost(path: str) -> bool:
    """Whether the fact at this path is a Cost."""
    return any(kind is Cost for _, _, kind in _fields_on_path(path)[-1:])


def unknown_facts(nested: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the paths in a nested mapping that are not facts."""
    found: list[str] = []
    for name, value in nested.items():
        path = f"{prefix}{name}"
        if not is_fact(path):
            found.append(path)
        elif isinstance(value, Mapping):
            found += unknown_facts(value, f"{path}.")
    return found


class FactField(NamedTuple):
    """Path, type, unit and documentation of a fact, for authors of rules."""

    path: str
    kind: str
    unit: str
    means: str


@functools.cache
def all_facts() -> list[FactField]:
    """All facts, including the fields of costs, in the order of ``docs/facts.md``."""
    return [fact for group, kind in fields_of(Facts).items() for fact in _described(group, kind)]


def _described(path: str, kind: Any) -> list[FactField]:
    fact = FactField(path, type_name(kind), unit_of(path), doc_of(path))
    inside = fields_of(kind)
    # Rules pass a source location to a filter as one value.
    below = (
        []
        if kind is Where
        else [one for name in inside for one in _described(f"{path}.{name}", inside[name])]
    )
    return [fact, *below] if not inside or kind in (Cost, Where) else below


def type_name(kind: Any) -> str:
    """Short name of a fact's type: ``float``, ``Cost``, ``list[int]``."""
    if isinstance(kind, type) and "[" not in str(kind):
        return kind.__name__
    return re.sub(r"ddpdoctor\.measure\.\w+\.", "", str(kind))


@functools.cache
def fields_of(kind: Any) -> dict[str, Any]:
    """Return a struct's fields and their types without None; {} for other types."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {}
    hints = typing.get_type_hints(kind)
    return {field.name: _without_none(hints[field.name]) for field in msgspec.structs.fields(kind)}


def doc_of(path: str) -> str:
    """Return a fact's documentation from facts.py as plain text; "" if it has none."""
    owners = [(getattr(owner, "__name__", ""), name) for owner, name, _ in _fields_on_path(path)]
    text = attribute_docs().get(owners[-1], "") if owners else ""
    return re.sub(r":\w+:`(\w+)`", r"\1", text).replace("``", "")


def short_label(path: str) -> str:
    """First clause of a fact's documentation. Reports use it as the label of the value."""
    clause = _CLAUSE.match(doc_of(path))
    return clause[0] if clause else ""


@functools.lru_cache(maxsize=1)
def attribute_docs() -> dict[tuple[str, str], str]:
    """Return the documentation of the fields in facts.py and of the causes in taxonomy.py, by (class, field), on one line."""
    sources = {path.name: path.read_bytes() for path in map(Path, _DOCUMENTED)}
    cached = CachedResult(list[tuple[str, str, str]], sources)
    found = cached.read()
    if found is None:
        found = [entry for source in sources.values() for entry in _docs_in(source)]
        cached.write(found)
    return {(_FACTS_OF.get(owner, owner), field): text for owner, field, text in found}


def _docs_in(source: bytes) -> list[tuple[str, str, str]]:
    import ast

    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(value=ast.Constant(value=str(name))),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    found.append((node.name, name, " ".join(docstring.split())))
    return found


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0]
    return hint
