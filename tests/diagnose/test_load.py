"""Rule files: a wrong one is refused with its file, the field and the reason."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.diagnose.load import load_rules, packaged_folder, read_folder, rule_packages
from ddpdoctor.diagnose.rule import checked_common
from ddpdoctor.errors import RuleError

GOOD = (packaged_folder() / "gpu" / "memory-full.yaml").read_text(encoding="utf-8")


def written(folder: Path, text: str) -> Path:
    file = folder / "gpu" / "memory-full.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("old", "new", "field", "reason"),
    [
        ("severity: info", "severity: dreadful", "`severity`", "dreadful"),
        ("severity: info", "seriousness: info", "top level", "seriousness"),
        ("question:", "#", "top level", "question"),
        ("id: gpu/memory-full", "id: gpu/other", "`id`", "gpu/memory-full"),
        (
            "when: gpu.memory_used_share >= t.memory_share",
            "when: 'gpu. >= ('",
            "`when`",
            "not a CEL expression",
        ),
        (
            "when: ddp.gradient_as_bucket_view == false",
            "when: '&&'",
            "`fixes[0].when`",
            "not a CEL expression",
        ),
        (
            "when: gpu.memory_used_share >= t.memory_share",
            "when: gpu.memory_usd_share >= t.memory_share",
            "`when`",
            "no fact 'gpu.memory_usd_share'",
        ),
        ("when: gpu.memory_used_share", "when: gpuu.memory_used_share", "`when`", "no fact 'gpuu"),
        (
            "when: ddp.gradient_as_bucket_view == false",
            "when: cost != null && cost.nothing > 1.0",
            "`fixes[0].when`",
            "no fact 'cost.nothing'",
        ),
        (
            "title: Reduce fragmentation with expandable segments",
            "title: '{% if %}'",
            "`fixes[4].title`",
            "not a Jinja2 template",
        ),
        ("needs: [gpu.memory_used_share]", "needs: [gpu.memory]", "`needs`", "no fact 'gpu.memory'"),
        ("  - {fact: steps.batch_size}", "  - {fact: cost.nothing}", "`evidence[6].fact`", "no fact"),
        (
            "facts: {gpu: {memory_used_share: 0.5}}",
            "facts: {gpu: {memory: 0.5}}",
            "`tests[1].facts`",
            "'gpu.memory'",
        ),
        ("severity: info", "severity: info\nevent: run.wall_s", "`event`", "of no steps"),
        ("severity: info", "severity: info\nevent: run.restarts", "`event`", "of no steps"),
        ("    value: 0.95", "    value: much", "`thresholds[...].value`", "float"),
        ("id: gpu/memory-full", "id: [", "not YAML", "line"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, old: str, new: str, field: str, reason: str) -> None:
    assert old in GOOD
    file = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(RuleError) as caught:
        load_rules([tmp_path])
    message = str(caught.value)
    assert message.startswith(str(file))
    assert field in message
    assert reason in message
    assert "\n" not in message


def test_a_folder_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="no such folder"):
        load_rules([tmp_path / "nowhere"])
    with pytest.raises(RuleError, match=r"<family>/<name>\.yaml"):
        load_rules([tmp_path])


def test_a_rule_of_the_same_id_replaces_ours(tmp_path: Path) -> None:
    written(tmp_path, GOOD.replace("question: Is device memory nearly full?", "question: Ours?"))
    rules = load_rules([tmp_path]).rules
    assert rules["gpu/memory-full"].question == "Ours?"
    assert len(rules) == len(load_rules().rules)


def test_packages_add_rules_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path, with its metadata, as pip would leave it."""
    written(tmp_path / "team_rules", GOOD.replace("id: gpu/memory-full", "id: ours/memory"))
    (tmp_path / "team_rules" / "gpu").rename(tmp_path / "team_rules" / "ours")
    (tmp_path / "team_rules" / "ours" / "memory-full.yaml").rename(
        tmp_path / "team_rules" / "ours" / "memory.yaml"
    )
    (tmp_path / "team_plugin.py").write_text(
        "from pathlib import Path\ndef rules():\n    return Path(__file__).parent / 'team_rules'\n",
        encoding="utf-8",
    )
    info = tmp_path / "team_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: team-plugin\nVersion: 1.0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text("[ddpdoctor.rules]\nteam = team_plugin:rules\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "ours/memory" in load_rules().rules
    assert "ours/memory" not in load_rules(entry_points=False).rules
    (tmp_path / "team_plugin.py").unlink()
    monkeypatch.delitem(__import__("sys").modules, "team_plugin")
    with pytest.raises(RuleError, match="entry point 'team'"):
        load_rules()


def test_ids_follow_the_files_places() -> None:
    rules = read_folder(packaged_folder())
    assert list(rules) == sorted(rules)
    assert all(rule_id == rule.id for rule_id, rule in rules.items())


@pytest.mark.parametrize("kind", ["folder on the path", "egg", "finder"])
def test_no_package_with_rules_is_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The look into the metadata that spares importlib.metadata must see whatever that would see."""
    written(tmp_path / "rules", GOOD)
    (tmp_path / "egg_plugin.py").write_text(f"FOLDER = {str(tmp_path / 'rules')!r}\n", encoding="utf-8")
    metadata = {"folder on the path": "Team_Plugin-1.0.DIST-INFO", "egg": "plugin-1.0.egg/EGG-INFO"}
    info = tmp_path / metadata.get(kind, "hidden/team-1.0.dist-info")
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: team\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[ddpdoctor.rules]\nteam = egg_plugin:FOLDER\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(info.parent if kind == "egg" else tmp_path))
    if kind == "finder":
        hidden = importlib.metadata.MetadataPathFinder.find_distributions(
            importlib.metadata.DistributionFinder.Context(path=[str(tmp_path / "hidden")])
        )
        finder = SimpleNamespace(
            find_spec=lambda *_: None, invalidate_caches=lambda: None, find_distributions=lambda _: hidden
        )
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert [entry.name for entry in rule_packages()] == ["team"]


def test_without_such_a_package_the_metadata_is_not_asked() -> None:
    code = (
        "import sys; from ddpdoctor.diagnose.load import rule_packages;"
        "print(rule_packages(), 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]


def test_a_rule_that_takes_the_place_of_the_pack_s_is_known_and_the_same_one_is_none(tmp_path):
    written(tmp_path, GOOD.replace("severity: info", "severity: warning"))
    assert load_rules([tmp_path], entry_points=False).replaced == ("gpu/memory-full",)
    assert load_rules([packaged_folder()], entry_points=False).replaced == ()


COMMON = (packaged_folder() / "common.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "field", "reason"),
    [
        ("cost.share >= t.least_share &&", "cost.shere >= t.least_share &&", "`cost_when`", "cost.shere"),
        ("cost_needs: [steps.mean_ms]", "cost_needs: [steps.mean]", "`cost_needs`", "steps.mean"),
        ("cost.ranks == null ||", "cost.ranks == = null ||", "`cost_shown.when`", "not a CEL expression"),
        ("{{ cost.ranks|ranks }} a delay", "{{ cost.ranks|rank }} a delay", "`cost_shown.otherwise`", "rank"),
        ("{{ cost.waiting_ms_per_step|ms }} per step; if", "{{ cost. }} per step; if", "`close`", "Jinja2"),
        ("{{ cost.steps_seen }} recorded", "{{ cost.steps_seen", "`short_window.explain`", "Jinja2"),
        ("title: Record the whole", "title: '{% if %}'\n    #", "`short_window.fix.title`", "Jinja2"),
    ],
)
def test_what_holds_for_all_rules_is_checked_as_they_are(old: str, new: str, field: str, reason: str) -> None:
    assert old in COMMON
    with pytest.raises(RuleError) as caught:
        checked_common(COMMON.replace(old, new).encode(), Path("common.yaml"))
    assert field in str(caught.value) and reason in str(caught.value)
