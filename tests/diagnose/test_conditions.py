"""CEL conditions: loaded without the package's command line, and given no more than they read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from ddpdoctor.diagnose.conditions import compiled, evaluate, paths_read


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_command_line_of_the_package_is_not_imported():
    code = "import sys, ddpdoctor.diagnose.engine; print(*{name.split('.')[0] for name in sys.modules})"
    assert not {"prompt_toolkit", "typer", "jinja2", "yaml"} & set(run(code).split())


@pytest.mark.parametrize("first", ["import cel", "from ddpdoctor.diagnose.conditions import evaluate"])
def test_the_whole_package_can_be_imported_beside_it(first):
    code = (
        f"{first}\nimport cel\nfrom cel import compile\nfrom ddpdoctor.diagnose.conditions import evaluate\n"
        "print(cel.evaluate('1 + 1'), compile('a > 1').execute({'a': 2}), evaluate('a > 1', {'a': 2}))"
    )
    assert run(code) == "2 True True"


def test_values():
    names = {"late": {"ms": 2.0, "where": [{"line": 3.0}]}, "t": {"least": 1.0}, "cost": None}
    assert evaluate("late.ms > t.least", names) is True
    assert evaluate("late.where.exists(w, w.line == 3.0) && cost == null", names) is True
    assert evaluate("has(late.other)", names) is False


def test_what_is_not_read_is_not_handed_over():
    class Reading(dict[str, object]):
        def __init__(self, names: Mapping[str, object]) -> None:
            super().__init__(names)

    unreadable = object()  # CEL could not convert it
    assert evaluate("a == 1.0", Reading({"a": 1.0, "b": unreadable})) is True


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="parse"):
        compiled("a. >= (")
    with pytest.raises(RuntimeError, match="'absent'"):
        evaluate("absent > 1.0", {"a": 1.0})
    with pytest.raises(KeyError, match="absent"):
        evaluate("a.absent > 1.0", {"a": {"b": 1.0}})


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("steps.mean_ms > t.least_ms", {"steps", "t", "steps.mean_ms", "t.least_ms"}),
        ("cost.where.exists(w, w.python_ms > 1.0)", {"cost", "cost.where"}),
        (
            'job.device == "gpu.memory" && size(late.total.ranks) > 0',
            {"job", "late", "job.device", "late.total.ranks"},
        ),
        ("job.backend.startsWith('a.b') ? true : false", {"job", "job.backend"}),
        ("1.5 > 2.5", set()),
    ],
)
def test_the_names_that_a_condition_reads(expression, names):
    assert set(paths_read(expression)) == names


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1+" * 20_000 + "1", "longer than 4000 characters"),
        ("[1].map(a, " * 3 + "1" + ")" * 3, "more than 2 of all, exists, map and filter"),
    ],
)
def test_an_expression_that_takes_all_stack_or_all_time_is_refused(expression, says):
    with pytest.raises(ValueError, match=says):
        compiled(expression)


def test_loops_within_and_beside_each_other_are_fine():
    expression = "[1, 2].all(a, [3].exists(b, b > a)) && [1].exists(c, c == 1) && ['.map(('].exists(d, [d].all(e, e == d))"
    assert evaluate(expression, {}) is True
