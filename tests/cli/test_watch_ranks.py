"""The table of ranks of ``ddpdoctor watch``: order, phases and current line."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from ddpdoctor.cli.watch_view import LineOfCode, Sort, View, phase_bar, rank_table
from ddpdoctor.telemetry import LiveRun

RUN = Path(__file__).parents[2] / "fixtures" / "slow-data-one-rank"


@pytest.fixture
def run():
    """A running job in which rank 1 waits for data."""
    live = LiveRun(RUN)
    live.look()
    live.manifest["ended_ns"] = None
    for rank in live.ranks.values():
        rank.ended = False
    return live


def lines(drawn, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(drawn)
    return [line.split() for line in console.file.getvalue().splitlines()]


def order(run, view):
    return [line[0] for line in lines(rank_table(run, view, {}))[1:]]


def test_ranks_are_sorted_in_the_chosen_order(run):
    assert order(run, View()) == ["0", "1"] and order(run, View(reverse=True)) == ["1", "0"]
    for sort in (Sort.LATE, Sort.DATA, Sort.STEP):
        assert order(run, View(sort=sort)) == ["1", "0"]
        assert order(run, View(sort=sort, reverse=True)) == ["0", "1"]


def test_ranks_without_values_come_last(run):
    run.samples["host1"]["ranks"] = {"1": {"rss_bytes": 5e8}}
    for reverse in (False, True):
        assert order(run, View(sort=Sort.MEMORY, reverse=reverse)) == ["1", "0"]


def test_keys_change_the_view_and_one_ends(run):
    view = View()
    assert [view.handle_key("s") or view.sort for _ in Sort] == [*list(Sort)[1:], Sort.RANK]
    assert not view.handle_key("r") and view.reverse and not view.handle_key("p") and view.phases
    assert not view.handle_key("x") and not view.handle_key("") and view.handle_key("q")


def test_the_phases_of_each_rank_and_of_all(run):
    heading, *rows = lines(rank_table(run, View(phases=True), {}))
    assert heading == ["rank", "data", "forward", "backward", "optimizer", "other"]
    shares = {row[0]: [int(cell) for cell in row[1:] if cell != "%"] for row in rows}
    assert shares["1"][0] > 50 > 5 > shares["0"][0] and shares["0"][2] > 50
    assert all(97 <= sum(each) <= 103 for each in shares.values())
    bar, legend = phase_bar(run)
    assert set(bar.plain) == {"█"} and 48 <= len(bar.plain) <= 50
    assert "■ data " in legend.plain and "■ backward " in legend.plain


def test_the_current_line_of_a_rank_is_shown_if_known(run):
    said = {1: {"phase": "data", "user": [["/home/me/train.py", 57, "main"]], "frames": []}}
    rows = {row[0]: " ".join(row) for row in lines(rank_table(run, View(), said))[1:]}
    assert "data train.py:57 for" in rows["1"] and "in a step for" in rows["0"]
    run.ranks[0].ended = True
    rows = {row[0]: row for row in lines(rank_table(run, View(), said))[1:]}
    assert rows["0"][-1] == "ended"


def test_a_narrow_terminal_keeps_the_number_of_the_line(run):
    run.ranks[1].host = "gpu-node-0123.cluster.internal"  # of several hosts the column is shown
    long = "a_training_script_of_mine.py"
    for hosts, name, shown in (
        (1, "train.py", "train.py:57"),
        (1, "pretrain_gpt.py", "pretrain_gpt.py:57"),
        (2, long, "mine.py:57"),
    ):
        run.ranks[0].host = run.ranks[1].host if hosts == 1 else "other-node"
        said = {1: {"phase": "data", "user": [[f"/home/me/{name}", 57, "main"]], "frames": []}}
        drawn = lines(rank_table(run, View(), said), 80)
        assert any(word.endswith(shown) for line in drawn for word in line), drawn
        assert ("host" in drawn[0]) == (hosts > 1)


@pytest.mark.parametrize(
    ("width", "drawn"),
    [
        (80, "rank 1 is stuck at /home/me/a/b/train.py:57 (load)"),
        (46, "rank 1 is stuck at …/me/a/b/train.py:57 (load)"),
        (40, "rank 1 is stuck at …/train.py:57 (load)"),
        (12, "rank 1 is stuck at train.py:57 (load)"),
        (8, "rank 1 is stuck at …n.py:57 (load)"),
    ],
)
def test_a_path_loses_its_first_folders_first(width, drawn):
    placed = LineOfCode("rank 1 is stuck at ", ["/home/me/a/b/train.py", 57, "load"], " (load)")
    assert " ".join(word for line in lines(placed, width) for word in line) == drawn
