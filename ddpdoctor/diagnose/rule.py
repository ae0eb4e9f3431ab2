"""The types of a rule file, ``<family>/<name>.yaml``, and its strict decoding and checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.conditions import compiled, paths_read
from ddpdoctor.diagnose.frameworks import NAMES, Framework, check
from ddpdoctor.diagnose.rule_texts import check_template
from ddpdoctor.errors import RuleError, did_you_mean
from ddpdoctor.rundir import read_bounded


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that a rule compares with; ``t.<name>`` in conditions and texts."""

    value: float
    source: str
    """Source of the number: a published rule, a measurement, or the reasoning behind it."""
    unit: str = ""


class Applies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition without which the rule does not apply to the job."""

    when: str
    otherwise: str
    """Reason in the list of skipped rules if the condition is false."""
    lacks_data: bool = False
    """Whether a false condition means that data are missing, not that the rule does not apply to the job."""


class Effect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another rule whose finding can be the cause of this rule's."""

    rule: str
    """Rule id, or ``*`` for any finding of at least a warning."""
    when: str | None = None
    """CEL over the facts and ``cause``, the Cost of the other finding."""


class EvidenceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fact to show with the finding."""

    fact: str
    """Path of a fact; ``cost.<name>`` is a field of the rule's own cost."""
    means: str | None = None
    """Label of the number (Jinja2); None: from the fact's documentation."""
    unit: str | None = None


class Tested(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the pack's tests run a Python snippet in a training of two ranks on CPUs."""

    stands: Literal["setup", "wrap", "step", "train", "update", "loop", "after", "loader"]
    """Position of the snippet: before the loop; instead of the call that wraps the model with DDP; at the end of each step; instead of
    forward, backward and update; instead of backward and update; instead of the loop; after the loop; a loader alone without training."""
    job: list[Literal["unused", "accumulates", "adam", "uneven"]] = []
    """Additional properties of the training: an unused layer, micro-batches, Adam, more batches on one rank."""
    results: Literal["same bits", "last bits", "other", "no training"]
    """Largest expected difference of the parameters from those of the same training without the snippet."""


class FixText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fix: Jinja2 texts over the facts."""

    title: str
    why: str
    when: str | None = None
    investigates: bool = False
    """Whether it is a step to find the cause and changes nothing. It is shown as "To do", not as "Fix"."""
    snippet: str | None = None
    tested: Tested | None = None
    """None: no test runs the snippet."""
    trade_off: str | None = None
    docs: list[str] = []
    settings: dict[str, str] = {}
    """Settings that ``ddpdoctor try`` changes to test this fix: name → value, a template."""
    in_frameworks: dict[str, str] = {}
    """Further settings, which ``ddpdoctor try`` cannot change or does not know; only for fixes in frameworks, see ``frameworks.yaml``."""


class RuleTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A test of a rule: facts, and the expected result."""

    name: str
    facts: dict[str, Any] = {}
    """Nested facts. ``share`` and ``speedup`` of a cost are optional: they are calculated from ``steps.mean_ms``."""
    fires: bool = False
    skipped: bool = False
    """Whether the rule must be skipped."""
    severity: str | None = None
    ranks: list[int] | None = None
    says: list[str] = []
    """Pieces of text that title, headline, explanation or fixes must contain."""


class ShortWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts added to findings of all rules that are based on outlier steps of a short window."""

    explain: str
    fix: FixText


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``common.yaml``: settings common to all rules with a cost."""

    thresholds: dict[str, Threshold]
    """Defaults, which a rule can override under the same name."""
    cost_when: str
    """CEL over ``cost``, required in addition to a rule's own ``when``: excludes costs that are too small or too rare."""
    cost_needs: list[str] = []
    """Facts without which no cost can be evaluated."""
    cost_shown: Applies | None = None
    """Condition under which the recorded steps confirm a cost; else the finding is withheld with ``otherwise`` (Jinja2)."""
    short_window: ShortWindow | None = None
    frameworks: list[Framework] = []
    """The table of ``frameworks.yaml``."""
    lasting: str = ""
    """Text added to the explanation of every cost; not empty if it was examined in too few steps to show that it lasts."""
    close: str = ""
    """Text added to the explanation if the cost depends on whether computation waits for collectives and the data do not show it."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule file."""

    id: str
    title: str
    question: str
    """The question that the rule answers."""
    explain: str
    headline: str
    """First sentence of the report if this is the costliest finding."""
    limits: str
    """When the finding is wrong."""
    when: str = "true"
    """CEL over facts, ``t`` (thresholds) and ``cost``. A rule with costs fires only if one was measured."""
    costs: str | list[str] | None = None
    """Path of a Cost in the facts. Of several, the rule reports the largest one for which ``cost_when`` and ``when`` hold."""
    costs_ms: str | None = None
    """CEL: milliseconds per step, for rules without a Cost; null: a finding without a cost."""
    costs_s: str | None = None
    """CEL: seconds of this run lost outside of ordinary steps; null: none. Such a finding has no cost per step."""
    recurs: bool = False
    """Whether the cost ``costs_s`` recurs during a run (like evaluations), so that a longer run loses more."""
    event: str | None = None
    """Path of a RunEvent in the facts with the steps in which the cost occurs."""
    severity: Literal["critical", "warning", "info"] | None = None
    """Fixed severity, for findings without a cost; otherwise it follows from the cost."""
    severity_most: Literal["warning", "info"] | None = None
    """Highest severity of a rule whose cost is only an upper bound of the saving (unless ``upper_bound`` is false)."""
    informs_when: str | None = None
    """CEL: if true, the severity is info regardless of the cost."""
    stops: bool = False
    """Whether the rule reports that the job stopped; such findings come first."""
    upper_bound: bool | None = None
    """Whether the cost is an upper bound of the saving; null: if ``severity_most`` is set or ``upper_bound_when`` holds. False: the cost is
    an estimate."""
    upper_bound_when: str | None = None
    """CEL: if true, the cost is an upper bound of the saving; otherwise it is the saving."""
    applies: list[Applies] = []
    needs: list[str] = []
    """Facts without which the rule is skipped."""
    cost_needs: list[str] = []
    """Facts without which an absent cost means "not measured" instead of "none found"."""
    effect_of: list[str | Effect] = []
    evidence: list[EvidenceLine] = []
    ranks: str | None = None
    """Path of the ranks that cause the cost, for rules without a Cost."""
    only_unexplained: bool = False
    """Whether the rule applies only to those of its ``ranks`` whose lateness no other finding explains."""
    where: str | None = None
    """Path of the user's source line, used if the cost has none."""
    where_leads: bool = False
    """Whether that line precedes the cost's own lines, for example if a setting on it causes the cost."""
    fixes: list[FixText]
    bound: dict[str, str] = {}
    """Settings that ``ddpdoctor try`` changes to simulate a job without the cause. A job cannot train with them."""
    thresholds: dict[str, Threshold] = {}
    tests: list[RuleTest]

    @property
    def cost_paths(self) -> list[str]:
        if self.costs is None:
            return []
        return [self.costs] if isinstance(self.costs, str) else self.costs

    @property
    def read_more(self) -> str | None:
        """The first page in the ``docs`` of the fixes."""
        return next((page for fix in self.fixes for page in fix.docs), None)

    @property
    def effects(self) -> list[Effect]:
        """``effect_of`` with every entry as an :class:`Effect`."""
        return [Effect(rule=entry) if isinstance(entry, str) else entry for entry in self.effect_of]


def read_rule(path: Path, rule_id: str) -> Rule:
    """Read and check one rule file. The :class:`RuleError` names the file, the field and the reason."""
    return checked_rule(read_file(path), path, rule_id)


_MAX_BYTES = 1 << 20
"""The longest rule of the pack has 12 KB."""
_MAX_VALUES = 100_000
_MAX_DEPTH = 40


def read_file(path: Path) -> bytes:
    """Content of a rule file. Raises :class:`RuleError` if it cannot be read."""
    try:
        return read_bounded(str(path), _MAX_BYTES, follow=True)
    except OSError as error:
        raise RuleError(f"{path}: cannot be read: {error.strerror}") from None


def checked_rule(content: bytes, path: Path, rule_id: str) -> Rule:
    """Decode and check a rule, the ``content`` of ``path``. The :class:`RuleError` names the file, the field and the reason."""
    rule: Rule = _decode(content, path, Rule)
    if rule.id != rule_id:
        raise RuleError(f"{path}: field `id`: is {rule.id!r}, but the file's path says {rule_id!r}")
    _check(path, _expressions(rule), _templates(rule), _paths(rule))
    if rule.event and not facts_view.is_fact(f"{rule.event}.longer"):
        raise RuleError(f"{path}: field `event`: {rule.event!r} says of no steps that they are longer")
    for number, test in enumerate(rule.tests):
        unknown = facts_view.unknown_facts(test.facts)
        if unknown:
            raise RuleError(f"{path}: field `tests[{number}].facts`: {_no_fact(unknown[0])}")
    return rule


_Fields = Sequence[tuple[str, str]]
"""(name of a field, its text)."""


def _check(path: Path, expressions: _Fields, templates: _Fields, facts: _Fields) -> None:
    """Raise :class:`RuleError` if a condition or a template is invalid, or names a fact that does not exist."""
    for field, expression in expressions:
        try:
            compiled(expression)
        except ValueError as error:
            raise RuleError(
                f"{path}: field `{field}`: not a CEL expression: {str(error).splitlines()[0]}"
            ) from None
        for read in paths_read(expression):
            if not _is_readable(read):
                raise RuleError(f"{path}: field `{field}`: {_no_fact(read)}")
    for field, template in templates:
        try:
            check_template(template)
        except Exception as error:
            wrong = "" if type(error) is ValueError else "not a Jinja2 template: "
            raise RuleError(f"{path}: field `{field}`: {wrong}{error}") from None
    for field, fact in facts:
        if not facts_view.is_fact(fact):
            raise RuleError(f"{path}: field `{field}`: {_no_fact(fact)}")


def _no_fact(path: str) -> str:
    near = did_you_mean(path, (fact.path for fact in facts_view.all_facts()))
    return f"there is no fact {path!r}.{near} `ddpdoctor rules facts` lists all."


def checked_common(content: bytes, path: Path) -> Common:
    """Decode and check ``common.yaml``. The :class:`RuleError` names the file, the field and the reason."""
    common: Common = _decode(content, path, Common)
    expressions = [("cost_when", common.cost_when)]
    templates = [("lasting", common.lasting), ("close", common.close)]
    if (shown := common.cost_shown) is not None:
        expressions.append(("cost_shown.when", shown.when))
        templates.append(("cost_shown.otherwise", shown.otherwise))
    if (short := common.short_window) is not None:
        expressions += [("short_window.fix.when", short.fix.when)] if short.fix.when is not None else []
        templates += [("short_window.explain", short.explain), *_texts("short_window.fix", short.fix)]
    _check(path, expressions, templates, [("cost_needs", fact) for fact in common.cost_needs])
    return common


def checked_frameworks(content: bytes, path: Path) -> list[Framework]:
    """Decode and check ``frameworks.yaml``. The :class:`RuleError` names the file, the field and the reason."""
    frameworks: list[Framework] = _decode(content, path, list[Framework])
    try:
        check(frameworks)
    except Exception as error:  # Jinja2's, for a template
        raise RuleError(f"{path}: {error}") from None
    return frameworks


def _decode(content: bytes, path: Path, kind: type[Any]) -> Any:
    try:
        _check_depth(content)
        found = msgspec.yaml.decode(content, type=kind)
        _check_expansion(found)
        return found
    except msgspec.ValidationError as error:
        reason, _, field = str(error).partition(" - at ")
        field = field.strip("`").removeprefix("$").removeprefix(".")
        raise RuleError(f"{path}: field `{field or 'top level'}`: {reason}") from None
    except Exception as error:  # PyYAML's own errors, which msgspec passes on
        raise RuleError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def _check_depth(content: bytes) -> None:
    """Raises ValueError if ``content`` is nested so deeply that libyaml, which is recursive, would crash."""
    import yaml

    depth = 0
    for event in yaml.parse(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")


def _check_expansion(value: Any) -> None:
    """Raises ValueError if YAML aliases expand to too many values, or contain themselves."""
    waiting, left = [value], _MAX_VALUES
    while waiting:
        one = waiting.pop()
        left -= 1
        if left < 0:
            raise ValueError(f"it holds more than {_MAX_VALUES} values, aliases followed")
        if isinstance(one, msgspec.Struct):
            waiting += [getattr(one, name) for name in one.__struct_fields__]
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one


def _is_readable(path: str) -> bool:
    """Whether conditions may read ``path``: a fact, a threshold, or a field of a cost or framework."""
    root, _, rest = path.partition(".")
    if root in ("cost", "cause"):
        return not rest or facts_view.is_fact(f"late.total.{rest}")
    if root == "framework":
        return not rest or rest in NAMES
    return root == "t" or facts_view.is_fact(path)


def _expressions(rule: Rule) -> list[tuple[str, str]]:
    found = [("when", rule.when)]
    for name in ("costs_ms", "costs_s", "informs_when", "upper_bound_when"):
        condition = getattr(rule, name)
        if condition is not None:
            found.append((name, condition))
    found += [(f"applies[{i}].when", entry.when) for i, entry in enumerate(rule.applies)]
    found += [(f"effect_of[{i}].when", e.when) for i, e in enumerate(rule.effects) if e.when is not None]
    found += [(f"fixes[{i}].when", fix.when) for i, fix in enumerate(rule.fixes) if fix.when is not None]
    return found


def _templates(rule: Rule) -> list[tuple[str, str]]:
    found = [("title", rule.title), ("headline", rule.headline), ("explain", rule.explain)]
    found += [(f"evidence[{i}].means", line.means) for i, line in enumerate(rule.evidence) if line.means]
    for i, fix in enumerate(rule.fixes):
        found += _texts(f"fixes[{i}]", fix)
    return found


def _texts(field: str, fix: FixText) -> list[tuple[str, str]]:
    texts = {name: getattr(fix, name) for name in ("title", "why", "snippet", "trade_off")}
    texts |= {f"settings.{name}": text for name, text in fix.settings.items()}
    texts |= {f"in_frameworks.{name}": text for name, text in fix.in_frameworks.items()}
    return [(f"{field}.{name}", text) for name, text in texts.items() if text is not None]


def _paths(rule: Rule) -> list[tuple[str, str]]:
    found = [("costs", path) for path in rule.cost_paths]
    found += [("needs", path) for path in rule.needs] + [("cost_needs", path) for path in rule.cost_needs]
    found += [("ranks", rule.ranks)] if rule.ranks else []
    found += [("where", rule.where)] if rule.where else []
    found += [("event", rule.event)] if rule.event else []
    for i, line in enumerate(rule.evidence):
        path = line.fact
        if path.startswith("cost."):
            path = "late.total." + path.removeprefix("cost.")
        found.append((f"evidence[{i}].fact", path))
    return found
