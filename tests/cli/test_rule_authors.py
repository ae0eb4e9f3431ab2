"""Commands for authors of rules: the facts, a template of a rule, and messages on unknown names."""

import pytest

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.load import read_folder
from ddpdoctor.diagnose.rule import read_rule
from ddpdoctor.errors import RuleError, did_you_mean
from tests.commands import command


def doctor(*arguments, cwd):
    done = command(*arguments, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def test_facts_are_listed_by_path_by_group_and_by_word(tmp_path):
    code, out, err = doctor("rules", "facts", "steps.mean_ms", cwd=tmp_path)
    assert (code, err) == (0, "") and out.startswith("steps.mean_ms  float, ms\n")
    _, out, _ = doctor("rules", "facts", "late.data", cwd=tmp_path)
    assert out.startswith("late.data  Cost\n    Waiting for the data loader.")
    assert "\nlate.data.share  float, share\n" in out and "late.copy" not in out
    _, out, _ = doctor("rules", "facts", "batch", cwd=tmp_path)
    assert "steps.batch_size  float\n" in out and "loader.batch_size" in out
    _, out, _ = doctor("rules", "facts", cwd=tmp_path)
    listed = {line.partition("  ")[0] for line in out.splitlines() if line and not line.startswith(" ")}
    assert {"job.world_size", "late.data", "shared.barrier", "hang.state"} <= listed
    assert "late.data.share" not in listed


def test_every_listed_fact_exists():
    assert [fact.path for fact in facts_view.all_facts() if not facts_view.is_fact(fact.path)] == []
    assert len({fact.path for fact in facts_view.all_facts()}) == len(facts_view.all_facts()) > 300


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["rules", "facts", "loader.num_wokers"], "loader.num_workers"),
        (["rules", "show", "dataloader/straved"], "dataloader/starved"),
        (["rules", "tets"], "test"),
        (["analyse", "run"], "analyze"),
        (["analyze", "run", "--markdwon", "f"], "--markdown"),
    ],
)
def test_mistyped_names_get_suggestions(tmp_path, arguments, meant):
    code, out, err = doctor(*arguments, cwd=tmp_path)
    assert (code, out) == (2, "") and "id you mean" in err and meant in err


def test_unrelated_names_get_no_suggestion(tmp_path):
    assert did_you_mean("zzzzzz", ["analyze", "run"]) == ""
    assert did_you_mean("analyz", ["analyze", "analyse", "run"]) == " Did you mean analyze or analyse?"
    code, _, err = doctor("qqqq", cwd=tmp_path)
    assert code == 2 and err.rstrip().endswith("No such command 'qqqq'.")


def test_a_new_rule_is_complete_and_its_tests_pass(tmp_path):
    code, out, err = doctor("rules", "new", "ours/slow-steps", "--in", "checks", cwd=tmp_path)
    assert (code, out) == (0, "") and "checks/ours/slow-steps.yaml" in err
    code, out, err = doctor("rules", "test", "checks", cwd=tmp_path)
    assert (code, err) == (0, "") and out.startswith("3 passed, 0 failed")
    assert set(read_folder(tmp_path / "checks")) == {"ours/slow-steps"}
    before = (tmp_path / "checks" / "ours" / "slow-steps.yaml").read_bytes()
    code, _, err = doctor("rules", "new", "ours/slow-steps", "--in", "checks", cwd=tmp_path)
    assert code == 2 and "already exists" in err
    assert (tmp_path / "checks" / "ours" / "slow-steps.yaml").read_bytes() == before


@pytest.mark.parametrize("rule_id", ["slow-steps", "../../x/y", "Ours/slow", "a/b/c", "ours/"])
def test_an_invalid_id_writes_nothing(tmp_path, rule_id):
    code, _, err = doctor("rules", "new", rule_id, cwd=tmp_path)
    assert code == 2 and "is not a rule id" in err and list(tmp_path.iterdir()) == []


def changed(tmp_path, old, new):
    """What is said of the rule to begin with, with one text changed."""
    doctor("rules", "new", "ours/rule", "--in", tmp_path, cwd=tmp_path)
    file = tmp_path / "ours" / "rule.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(RuleError) as refused:
        read_rule(file, "ours/rule")
    return str(refused.value)


def test_a_filter_that_does_not_exist_is_refused_when_the_rule_is_loaded_also_within_a_condition(tmp_path):
    said = changed(tmp_path, "|count('rank')", "|conut('rank')")
    assert "field `explain`: there is no filter 'conut'. Did you mean count?" in said


def test_a_test_of_jinja_that_does_not_exist_is_refused(tmp_path):
    said = changed(tmp_path, "{% if job.world_size %}", "{% if job.world_size is postive %}")
    assert "field `explain`: there is no test 'postive'." in said


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("when: steps.median_ms", "when: steps.medain_ms", "when"),
        ("needs: [steps.median_ms]", "needs: [step.median_ms]", "needs"),
        ("{steps: {median_ms: 40.0}}", "{steps: {median: 40.0}}", "tests[1].facts"),
    ],
)
def test_an_unknown_fact_gets_a_suggestion(tmp_path, old, new, field):
    said = changed(tmp_path, old, new)
    assert f"field `{field}`: there is no fact" in said and "steps.median_ms" in said
    assert "`ddpdoctor rules facts` lists all" in said


def test_built_in_ids_and_links_are_refused(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for arguments, words in (
        (["dataloader/starved", "--in", str(tmp_path / "mine")], "is a built-in rule"),
        (["ours/slow", "--in", str(tmp_path / "link")], "is a symbolic link"),
    ):
        code, _, err = doctor("rules", "new", *arguments, cwd=tmp_path)
        assert code == 2 and words in err
    assert not list((tmp_path / "there").iterdir()) and not (tmp_path / "mine").exists()
