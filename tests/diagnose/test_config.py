"""ddpdoctor.toml and [tool.ddpdoctor]."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.diagnose.config import Config, check_config, load_config
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.errors import DdpDoctorError


def test_nothing_set_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n", encoding="utf-8")
    assert load_config(tmp_path) == Config()


def test_the_nearest_file_counts_and_folders_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.ddpdoctor]\nrules = ['checks']\nsuppress = ['ddp/*']\n"
        "[tool.ddpdoctor.thresholds.'dataloader/starved']\nleast_share = 0.1\n",
        encoding="utf-8",
    )
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    config = load_config(below)
    assert config.rules == [str(tmp_path.resolve() / "checks")]
    assert config.suppress == ["ddp/*"]
    assert config.thresholds == {"dataloader/starved": {"least_share": 0.1}}
    check_config(config, load_rules(entry_points=False))
    (below / "ddpdoctor.toml").write_text("suppress = ['gpu/memory-full']\n", encoding="utf-8")
    assert load_config(below).suppress == ["gpu/memory-full"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "ddpdoctor.toml",
            "suppres = []",
            ["no key `suppres`", "Did you mean suppress?", "thresholds, suppress, rules"],
        ),
        ("ddpdoctor.toml", "suppress = 3", ["`suppress`"]),
        (
            "ddpdoctor.toml",
            "[thresholds.all]\nleast_share = 'much'",
            ["`thresholds.all.least_share`", "'much'"],
        ),
        ("ddpdoctor.toml", "[thresholds]\nall = 3", ["`thresholds.all`"]),
        ("ddpdoctor.toml", "file = 'x'", ["no key `file`", "thresholds, suppress, rules"]),
        ("ddpdoctor.toml", "suppress = [", ["not TOML"]),
        ("pyproject.toml", "[tool.ddpdoctor]\nrules = 1", ["`tool.ddpdoctor.rules`"]),
        ("pyproject.toml", "tool.ddpdoctor = 1", ["`tool.ddpdoctor`", "object"]),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_field(
    tmp_path: Path, name: str, text: str, words: list[str]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DdpDoctorError) as caught:
        load_config(tmp_path)
    assert all(word in str(caught.value) for word in [name, *words])


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (Config(suppress=["ddp/nothing"]), "ddp/nothing"),
        (Config(suppress=["nothing/*"]), "nothing/*"),
        (Config(thresholds={"nothing/at-all": {}}), "nothing/at-all"),
        (Config(thresholds={"dataloader/starved": {"hidden_share": 1.0}}), "hidden_share"),
        (Config(thresholds={"all": {"leest_share": 1.0}}), "leest_share"),
        (
            Config(thresholds={"all": {"warning_share": 5.0}}),
            "thresholds.all.warning_share: 5.0 is not a share",
        ),
        (
            Config(thresholds={"all": {"least_ms": -1.0}}),
            "thresholds.all.least_ms: -1.0 is not a valid threshold",
        ),
        (Config(thresholds={"all": {"least_ms": float("nan")}}), "least_ms: nan is not a valid threshold"),
    ],
)
def test_what_means_nothing_is_refused(config: Config, word: str) -> None:
    with pytest.raises(DdpDoctorError, match=word.replace("*", r"\*")):
        check_config(config, load_rules(entry_points=False))


@pytest.mark.parametrize(
    ("pyproject", "suppressed"),
    [
        ("# no tool.ddpdoctor here\n[project]\ndependencies = ['ddpdoctor']\n", "ddp/*"),
        ("[tool.'ddpdoctor']\nsuppress = ['gpu/*']\n", "gpu/*"),
        ("[tool]\nddpdoctor = {suppress = ['gpu/*']}\n", "gpu/*"),
    ],
)
def test_the_table_counts_however_it_is_written_and_a_comment_is_none(
    tmp_path: Path, pyproject: str, suppressed: str
) -> None:
    (tmp_path / "ddpdoctor.toml").write_text("suppress = ['ddp/*']\n", encoding="utf-8")
    below = tmp_path / "below"
    below.mkdir()
    (below / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    assert load_config(below).suppress == [suppressed]


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A file that suppresses a rule, below which the user works."""
    (tmp_path / "ddpdoctor.toml").write_text("suppress = ['gpu/memory-full']\n", encoding="utf-8")
    (tmp_path / "below").mkdir()
    return tmp_path / "ddpdoctor.toml"


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("owner", "belongs to another user"),
        ("file", "every user may write to it"),
        ("folder", "put files into"),
    ],
)
def test_what_another_user_may_have_written_decides_nothing(
    strange: Path, monkeypatch: pytest.MonkeyPatch, reason: str, says: str
) -> None:
    if reason == "file":
        strange.chmod(0o666)
    elif reason == "folder":
        strange.parent.chmod(0o1777)
    elif os.geteuid() == 0:
        os.chown(strange, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    config = load_config(strange.parent / "below")
    assert (config.suppress, config.file) == ([], None)
    (sentence,) = config.ignored_files
    assert str(strange) in sentence and says in sentence and "copy it to a folder of your own" in sentence


def test_a_file_further_up_counts_where_the_nearer_one_is_somebody_elses(strange: Path) -> None:
    nearer = strange.parent / "below" / "pyproject.toml"
    nearer.write_text("[tool.ddpdoctor]\nsuppress = ['ddp/*']\n", encoding="utf-8")
    nearer.chmod(0o666)
    config = load_config(nearer.parent)
    assert config.suppress == ["gpu/memory-full"] and str(nearer) in config.ignored_files[0]
    nearer.write_text("[tool.other]\n", encoding="utf-8")
    assert load_config(nearer.parent).ignored_files == ()


@pytest.mark.parametrize("kind", ["fifo", "folder", "large"])
def test_what_is_no_configuration_is_passed_over(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "ddpdoctor.toml"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.touch()
        os.truncate(place, 1 << 40)
    assert load_config(tmp_path) == Config()


@pytest.mark.parametrize("page", ["ci.md", "formats.md"])
def test_the_configurations_in_the_guides_are_accepted(page, tmp_path):
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "suppress" in block]
    assert blocks
    for block in blocks:
        (tmp_path / "ddpdoctor.toml").write_text(block)
        config = load_config(tmp_path)
        assert config.suppress
        check_config(msgspec.structs.replace(config, rules=[]), load_rules())
