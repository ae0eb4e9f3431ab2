"""Evaluates every rule over the facts. A rule that lacks data or fails is skipped, with a reason, and the other rules still run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from ddpdoctor.diagnose import facts_view, frameworks, rule_texts
from ddpdoctor.diagnose.conditions import evaluate
from ddpdoctor.diagnose.diagnosis import CheckedRule, Coverage, Evidence, Finding, Fix, SkippedRule
from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.diagnose.rewording import reworded_for_job
from ddpdoctor.diagnose.rule import Common, FixText, Rule
from ddpdoctor.diagnose.verdict import RuleHit, is_from_short_window, order_findings
from ddpdoctor.measure.facts import Cost, Facts
from ddpdoctor.measure.places import Where


class Outcome(msgspec.Struct, frozen=True):
    """Results of all rules."""

    findings: list[Finding] = msgspec.field(default_factory=list)
    """The costliest first; findings that are effects of other findings come last."""
    checked: list[CheckedRule] = msgspec.field(default_factory=list)
    skipped: list[SkippedRule] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    """Errors in rules and withheld findings, one sentence each. They do not invalidate the findings."""
    headlines: dict[str, str] = msgspec.field(default_factory=dict)
    """By rule id, the first sentence of the report if the rule's finding is the main one."""
    thresholds: dict[str, float] = msgspec.field(default_factory=dict)
    """The common thresholds after overrides."""
    short_window_rules: list[str] = msgspec.field(default_factory=list)
    """Ids of rules whose finding is "info" at most because it is based on few outlier steps of a short window, in order."""
    capped_rules: list[str] = msgspec.field(default_factory=list)
    """Ids of rules with a fixed severity whose finding is only "info", usually because of ``informs_when``."""
    stopping: list[str] = msgspec.field(default_factory=list)
    """Ids of rules that report why the job stopped."""
    suppressed: list[str] = msgspec.field(default_factory=list)
    """Ids of rules that were not run because the user suppressed them."""
    contradictions: list[str] = msgspec.field(default_factory=list)
    """Contradictions between measured numbers, as clauses of a sentence."""
    unexplained: list[str] = msgspec.field(default_factory=list)
    """Large costs that only rules that lacked data could have reported, as clauses of a sentence, the costliest first."""


class RuleSkippedError(Exception):
    """The rule is skipped; the exception's text is the reason."""


class NotApplicableError(RuleSkippedError):
    """The rule does not apply to the job."""


class NotMeasuredError(RuleSkippedError):
    """Facts that the rule needs were not measured."""


class NotCorroboratedError(RuleSkippedError):
    """The recorded steps do not confirm the finding's cost, so the finding is withheld."""

    def __init__(self, why: str, share: float) -> None:
        super().__init__(f"the measured numbers contradict each other: {why}")
        self.why = why
        self.share = share
        """Share of the step that the withheld finding would report."""


def diagnose(
    facts: Facts,
    rules: RuleSet,
    *,
    coverage: Coverage,
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    suppressed: Collection[str] = (),
) -> Outcome:
    """Run every rule over the facts.

    Args:
        facts: all measured numbers.
        rules: from :func:`ddpdoctor.diagnose.load.load_rules`.
        coverage: numbers of steps and ranks analysed, for findings whose cost does not count its steps.
        thresholds: overrides, by rule id and threshold name; those for the id ``all`` apply to all rules.
        suppressed: ids of rules that are not run, or of whole families (``ddp/*``).
    """
    overrides = thresholds or {}
    tree = facts_view.tree(facts)
    context = facts_view.as_cel(tree)
    common = {name: entry.value for name, entry in rules.common.thresholds.items()}
    base = {**common, **overrides.get("all", {})}
    outcome, hits = Outcome(thresholds=base), list[RuleHit]()
    suppressed_ranks: set[int] = set()
    not_evaluated: list[tuple[_Run, str]] = []
    for rule in sorted(rules.rules.values(), key=lambda rule: rule.only_unexplained):
        if rule.id in suppressed or rule.id.partition("/")[0] + "/*" in suppressed:
            outcome.suppressed.append(rule.id)
            suppressed_ranks.update(_ranks_of_costs(tree, rule))
            continue
        named = base | {name: entry.value for name, entry in rule.thresholds.items()}
        named.update({**overrides.get("all", {}), **overrides.get(rule.id, {})})
        seen = _without_reported_ranks(tree, rule, hits, suppressed_ranks) if rule.only_unexplained else tree
        in_cel = context if seen is tree else facts_view.as_cel(seen)
        run = _Run(rule, rules.common, seen, in_cel, named, coverage)
        try:
            finding = run.finding()
        except RuleSkippedError as reason:
            applies = not isinstance(reason, NotApplicableError)
            outcome.skipped.append(SkippedRule(rule.id, rule.question, str(reason), applies))
            if isinstance(reason, NotMeasuredError):
                not_evaluated.append((run, str(reason)))
            elif isinstance(reason, NotCorroboratedError) and reason.share >= base["warning_share"]:
                outcome.errors.append(f"{rule.id} was withheld: {reason.why}.")
                outcome.contradictions.append(reason.why)
        except Exception as error:  # a rule file may cause any error, and the other rules must still run
            why = f"the rule failed: {' '.join(str(error).split())[:300]}"
            outcome.skipped.append(SkippedRule(rule.id, rule.question, why))
            outcome.errors.append(f"{rule.id}: {why}")
            not_evaluated.append((run, why))
        else:
            outcome.errors.extend(run.errors)
            if finding is None:
                outcome.checked.append(CheckedRule(rule.id, rule.question))
            else:
                hits.append(RuleHit(finding, rule, run.cost, named, run.informs))
                outcome.headlines[rule.id] = run.headline
    outcome.findings.extend(order_findings(hits, context, base, outcome.errors))
    hit_of = {entry.rule.id: entry for entry in hits}
    capped = [hit for finding in outcome.findings if (hit := hit_of[finding.rule]).capped_to_info]
    outcome.short_window_rules.extend(hit.rule.id for hit in capped if hit.from_short_window)
    outcome.capped_rules.extend(hit.rule.id for hit in capped if hit.rule.severity is not None)
    outcome.stopping.extend(entry.rule.id for entry in hits if entry.rule.stops)
    outcome.unexplained.extend(_unexplained(not_evaluated, outcome, rules, base["warning_share"]))
    return outcome


def _unexplained(
    not_evaluated: list[tuple[_Run, str]], outcome: Outcome, rules: RuleSet, least_share: float
) -> list[str]:
    """Clauses on costs of at least ``least_share`` of the step that only rules in ``not_evaluated`` could have reported, with the reason
    why these were not evaluated."""
    evaluated = [*(each.rule for each in outcome.checked), *(each.rule for each in outcome.findings)]
    reported = {path for rule_id in evaluated for path in rules.rules[rule_id].cost_paths}
    found: dict[str, tuple[float, str]] = {}
    for run, why in not_evaluated:
        try:
            costs = run.open_costs()
        except Exception:  # as above: the failure is noted already
            continue
        for cost, path in costs:
            if path not in reported and cost["share"] >= least_share:
                part = f"{rule_texts.ms(cost['ms_per_step'])} of a {rule_texts.ms(run.tree['steps']['mean_ms'])} step on average"
                found.setdefault(
                    path, (cost["share"], f"{part} may be a problem, but {run.rule.id} lacked data ({why})")
                )
    return [sentence for _, sentence in sorted(found.values(), reverse=True)]


def _ranks_of_costs(tree: dict[str, Any], rule: Rule) -> set[int]:
    """The ranks in a suppressed rule's costs. Rules for ranks that no other rule explains must not report them instead."""
    costs = [facts_view.lookup(tree, path) for path in rule.cost_paths]
    return {rank for cost in costs if cost for rank in cost.get("ranks") or ()}


def _without_reported_ranks(
    tree: dict[str, Any], rule: Rule, hits: list[RuleHit], suppressed_ranks: Collection[int]
) -> dict[str, Any]:
    """The facts, in which the list ``rule.ranks`` lacks ranks whose lateness another finding explains (an event, such as a pause, only if
    they are late in less than half of the steps), or that a suppressed rule would have reported."""
    group, _, name = (rule.ranks or "").partition(".")
    if not (ranks := facts_view.lookup(tree, rule.ranks or "")):
        return tree
    seen, late_steps = tree[group].get("steps_seen") or 0, tree[group].get("late_steps") or {}
    seldom = [rank for rank in ranks if 2 * late_steps.get(str(rank), seen) < seen]
    reported = set(suppressed_ranks)
    for hit in hits:
        explained = ranks if hit.is_in_ordinary_steps else seldom if hit.rule.event else ()
        reported.update(set(explained).intersection(hit.finding.ranks or ()))
    return tree | {group: tree[group] | {name: [rank for rank in ranks if rank not in reported]}}


_SAME_STEP = 1.02  # mean steps up to this ratio count as the same
_Candidate = tuple[dict[str, Any] | None, str | None]
"""A cost and its path in the facts. The cost is None if the rule has none; the path is None if the cost is not a fact."""


class _Run:
    """Evaluates one rule over one set of facts."""

    def __init__(
        self,
        rule: Rule,
        common: Common,
        tree: dict[str, Any],
        context: dict[str, Any],
        thresholds: dict[str, float],
        coverage: Coverage,
    ) -> None:
        self.rule = rule
        self.common = common
        self.tree = tree
        self.context = context | {"t": facts_view.as_cel(thresholds)}
        self.thresholds = thresholds
        self.coverage = coverage
        self.cost: dict[str, Any] | None = None
        self.cost_path: str | None = None
        self.framework = self.context["framework"] = dict(frameworks.NAMES)
        self.headline = ""
        self.informs = False
        """Whether the rule's ``informs_when`` holds for the finding."""
        self.errors: list[str] = []

    def finding(self) -> Finding | None:
        """Return the rule's finding, or None if the rule found nothing. Raises :class:`RuleSkippedError` if the rule cannot be evaluated or
        its finding is withheld."""
        rule = self.rule
        for condition in rule.applies:
            if not self._holds(condition.when):
                kind = RuleSkippedError if condition.lacks_data else NotApplicableError
                raise kind(condition.otherwise)
        self._require(rule.needs)
        withheld: NotCorroboratedError | None = None
        for cost, path in self._candidates():
            self.cost, self.cost_path = cost, path
            self.context["cost"] = facts_view.as_cel(cost)
            named = cost["where"] if cost else facts_view.lines_at(self.tree, rule.where)
            self.framework = frameworks.names(self.common.frameworks, named, self.tree["job"])
            self.context["framework"] = self.framework
            if cost is not None and not self._holds(self.common.cost_when):
                continue
            if not self._holds(rule.when):
                continue
            not_corroborated = self._corroboration_error()
            if not_corroborated is None:
                return self._to_finding()
            withheld = withheld or not_corroborated
        if withheld is not None:
            raise withheld
        return None

    def _candidates(self) -> Sequence[_Candidate]:
        """The costs that the rule may report, with their paths, the costliest first; a single cost without a path if the rule computes it
        (``costs_ms``); (None, None) if it has no cost."""
        rule = self.rule
        if rule.cost_paths:
            self._require(self.common.cost_needs)
            found = self._costs()
            if not found:
                self._require(rule.cost_needs)
            return found
        if rule.costs_ms is not None and self._holds(rule.when):
            cost_ms = self._amount("costs_ms", rule.costs_ms)
            if cost_ms is not None:
                self._set_cost(cost_ms)
        return [(self.cost, None)]

    def open_costs(self) -> list[tuple[dict[str, Any], str]]:
        """The measured costs that this rule could have reported if it had been evaluated, with their paths."""
        if self.tree["steps"]["mean_ms"] is None:
            return []
        found = []
        for cost, path in self._costs():
            self.context["cost"] = facts_view.as_cel(cost)
            if self._holds(self.common.cost_when):
                found.append((cost, path))
        return found

    def _corroboration_error(self) -> NotCorroboratedError | None:
        """An error if the recorded steps, as the timelines in reports show them, do not confirm the current cost; else None."""
        shown, cost = self.common.cost_shown, self.cost
        if cost is None or shown is None or cost["drawn_ms"] is None or self._holds(shown.when):
            return None
        return NotCorroboratedError(
            rule_texts.render(shown.otherwise, self.tree | {"cost": cost}), cost["share"]
        )

    def _require(self, paths: list[str]) -> None:
        missing = [path for path in paths if facts_view.lookup(self.tree, path) is None]
        if "steps.mean_ms" in missing:
            raise NotMeasuredError("step times were not measured")
        if missing:
            raise NotMeasuredError(f"not measured: {facts_view.missing_measurements(missing)}")

    def _costs(self) -> list[tuple[dict[str, Any], str]]:
        """The measured costs of the rule with their paths, the costliest first."""
        found = [(facts_view.lookup(self.tree, path), path) for path in self.rule.cost_paths]
        known = [(cost, path) for cost, path in found if cost is not None]
        return sorted(known, key=lambda pair: -pair[0]["ms_per_step"])

    def _set_cost(self, cost_ms: float) -> None:
        self._require(["steps.mean_ms"])
        mean_ms = float(self.tree["steps"]["mean_ms"])
        saved_ms = min(cost_ms, mean_ms)
        rest_ms = max(mean_ms - saved_ms, 0.01 * mean_ms)
        culprits = facts_view.lookup(self.tree, self.rule.ranks) if self.rule.ranks else None
        self.cost = msgspec.to_builtins(
            Cost(ms_per_step=saved_ms, share=saved_ms / mean_ms, speedup=mean_ms / rest_ms, ranks=culprits)
        )

    def _value(self, expression: str) -> Any:
        return evaluate(expression, self.context)

    def _amount(self, field: str, expression: str) -> float | None:
        """Value of ``expression``, which is the rule's ``field``; 0 if it is negative, None if it is null. Raises TypeError if it is
        anything else than a finite number."""
        value = self._value(expression)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise TypeError(f"`{field}` gives {str(value)[:60]}, not a finite number")
        return max(float(value), 0.0)

    def _holds(self, expression: str) -> bool:
        value = self._value(expression)
        if not isinstance(value, bool):
            raise TypeError(f"{expression!r} gives {value!r}, not true or false")
        return value

    def _to_finding(self) -> Finding:
        rule, cost = self.rule, self.cost
        names = self._template_names()
        self.headline = rule_texts.render(rule.headline, names)
        run = self.tree["run"]
        once_s = None if rule.costs_s is None else self._amount("costs_s", rule.costs_s)
        costs_s = self._recurring_s() if once_s is None else once_s
        persistence, steps = self._occurrence()
        # If the recording does not mark steps, a step's speed-up has no meaning.
        marked = self.tree["steps"]["marked"] is not False
        return Finding(
            rule=rule.id,
            severity=self._severity(),
            title=rule_texts.render(rule.title, names),
            explanation=self._explanation(names),
            ranks=names["culprits"],
            steps=steps,
            persistence=persistence,
            where=[msgspec.convert(entry, Where) for entry in names["where"]],
            costs_ms_per_step=cost["ms_per_step"] if cost else None,
            costs_ms_per_step_range=facts_view.range_ms(cost),
            share=cost["share"] if cost else None,
            costs_s=costs_s,
            share_of_run=None if costs_s is None or not run["wall_s"] else min(costs_s / run["wall_s"], 1.0),
            happens_once=once_s is not None and not rule.recurs,
            speedup_if_fixed=cost["speedup"] if cost and marked else None,
            speedup_if_fixed_range=facts_view.speedups(cost) if marked else None,
            at_most=cost is not None and self._is_upper_bound(),
            estimated=cost is not None and rule.upper_bound is False,
            coverage=self.coverage.of_cost(cost),
            evidence=self._evidence(names),
            fixes=self._fixes(names),
            bound=self.rule.bound,
            limits=" ".join(rule.limits.split()),
            question=" ".join(rule.question.split()),
            read_more=rule.read_more,
        )

    def _occurrence(self) -> tuple[str | None, list[int] | None]:
        """(persistence, [first, last] of the steps in which the cost or event occurs; None if in all steps or unknown)."""
        event = facts_view.lookup(self.tree, self.rule.event) if self.rule.event else None
        if event is not None:
            return event["persistence"], event["longer"] or None
        if self.cost is None:
            return None, None
        always = self.cost["persistence"] == "always" or self.cost["first_step"] is None
        return self.cost["persistence"], None if always else [self.cost["first_step"], self.cost["last_step"]]

    def _recurring_s(self) -> float | None:
        """Total of a cost per step over the whole run, seconds; None if unknown."""
        steps = self.tree["run"]["steps"]
        return None if self.cost is None or steps is None else self.cost["ms_per_step"] * steps / 1000.0

    def _template_names(self) -> dict[str, Any]:
        cost = self.cost
        mean_ms = self.tree["steps"]["mean_ms"]
        recorded = cost["where"] if cost else []
        where = frameworks.changeable_first(self.common.frameworks, recorded, self.tree["job"])
        if self.rule.where and (not where or self.rule.where_leads):
            leading = facts_view.lines_at(self.tree, self.rule.where)
            places = {(line["file"], line["line"]): line for line in where}
            where = [places.pop((line["file"], line["line"]), line) for line in leading] + list(
                places.values()
            )
        culprits = cost["ranks"] if cost else None
        if culprits is None and self.rule.ranks:
            culprits = facts_view.lookup(self.tree, self.rule.ranks)
        before_ms = self._step_with_cost_ms(mean_ms)
        after_ms = before_ms / cost["speedup"] if cost and before_ms is not None else None
        beside_ms = cost["beside_ms_per_step"] if cost else None
        return self.tree | {
            "t": self.thresholds,
            "cost": cost,
            "where": where,
            "culprits": culprits,
            "framework": self.framework,
            "before_ms": before_ms,
            "after_ms": after_ms,
            # Step time after the fix. If the fix moves work to other cores, idle cores limit what it saves.
            "best_ms": after_ms
            if after_ms is None or beside_ms is None
            else max(after_ms, before_ms - beside_ms),
        }

    def _step_with_cost_ms(self, mean_ms: float | None) -> float | None:
        """The mean step to which the cost's share refers: longer than the measured ones if steps with the cause were excluded."""
        cost = self.cost
        if mean_ms is None or not cost or not cost["share"] or cost["persistence"] == "always":
            return mean_ms
        whole_ms = float(cost["ms_per_step"] / cost["share"])
        return whole_ms if whole_ms > _SAME_STEP * mean_ms else mean_ms

    def _explanation(self, names: dict[str, Any]) -> str:
        short = self.common.short_window if is_from_short_window(self.cost) else None
        added = [short.explain] if short else [self.common.lasting]
        added += [self.common.close] if self.cost and self.cost["waiting_ms_per_step"] is not None else []
        return rule_texts.render("\n\n".join([self.rule.explain, *added]), names)

    def _severity(self) -> str:
        rule, cost, limit = self.rule, self.cost, self.thresholds
        self.informs = rule.informs_when is not None and self._holds(rule.informs_when)
        if self.informs:
            return "info"
        if rule.severity is not None:
            return rule.severity
        if cost is None:
            return "info"
        mean_ms = self.tree["steps"]["mean_ms"]
        tiny = mean_ms < limit["tiny_step_ms"] and cost["ms_per_step"] < limit["tiny_cost_ms"]
        if cost["share"] < limit["warning_share"] or rule.severity_most == "info" or tiny:
            return "info"
        if is_from_short_window(self.cost) and len(cost["stands_out_in"]) < limit["outstanding_steps"]:
            return "info"
        too_few_steps = self.coverage.steps < limit["critical_steps"]
        if (
            cost["share"] < limit["critical_share"]
            or rule.severity_most == "warning"
            or is_from_short_window(self.cost)
            or too_few_steps
            or self._is_upper_bound()
        ):
            return "warning"
        beside_ms = cost["beside_ms_per_step"]
        if beside_ms is not None and cost["ranks"] is None and beside_ms < limit["critical_share"] * mean_ms:
            # A fix would save less than the critical share, for lack of idle cores.
            return "warning"
        return "critical"

    def _is_upper_bound(self) -> bool:
        rule = self.rule
        if rule.upper_bound is not None:
            return rule.upper_bound
        return rule.severity_most is not None or (
            rule.upper_bound_when is not None and self._holds(rule.upper_bound_when)
        )

    def _evidence(self, names: dict[str, Any]) -> list[Evidence]:
        found = []
        for entry in self.rule.evidence:
            path = entry.fact
            if path.startswith("cost."):
                name = path.removeprefix("cost.")
                value = (self.cost or {}).get(name)
                path = f"{self.cost_path}.{name}" if self.cost_path else path
            else:
                value = facts_view.lookup(self.tree, path)
            if value is None:
                continue
            means = rule_texts.render(entry.means, names) if entry.means else facts_view.short_label(path)
            unit = entry.unit if entry.unit is not None else facts_view.unit_of(path)
            found.append(Evidence(path, value, reworded_for_job(unit, names), reworded_for_job(means, names)))
        return found

    def _fixes(self, names: dict[str, Any]) -> list[Fix]:
        found = frameworks.fixes_of(self.framework, names)
        short = self.common.short_window if is_from_short_window(self.cost) else None
        for number, fix in enumerate([*self.rule.fixes, *([short.fix] if short else [])], start=1):
            try:
                if fix.when is None or self._holds(fix.when):
                    found.append(_fix(fix, names, self.common))
            except Exception as error:  # the finding is reported even if one of its fixes is invalid
                reason = " ".join(str(error).split())[:300]
                self.errors.append(f"{self.rule.id}: fix {number} is skipped: {reason}")
        return found


def _fix(fix: FixText, names: dict[str, Any], common: Common) -> Fix:
    found = Fix(
        title=rule_texts.render(fix.title, names),
        why=rule_texts.render(fix.why, names),
        investigates=fix.investigates,
        snippet=None if fix.snippet is None else rule_texts.render_snippet(fix.snippet, names),
        trade_off=None if fix.trade_off is None else rule_texts.render(fix.trade_off, names),
        docs=fix.docs,
        settings={name: rule_texts.render(text, names) for name, text in fix.settings.items()},
    )
    settings = found.settings or {
        name: rule_texts.render(text, names) for name, text in fix.in_frameworks.items()
    }
    in_words = frameworks.as_framework_settings(common.frameworks, found, settings, fix.title, names)
    return in_words or frameworks.with_hook_variables(common.frameworks, found, names["where"])
