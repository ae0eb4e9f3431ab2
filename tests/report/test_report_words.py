from __future__ import annotations

import pytest

from ddpdoctor.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not recorded"),
        (0, "0 ms"),
        (44.8, "44.8 ms"),
        (1250, "1.25 s"),
        (0.085, "85.0 µs"),
        (95_000, "1 min 35 s"),
    ],
)
def test_milliseconds_take_the_unit_that_suits(value, text):
    assert words.milliseconds(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "not recorded"),
        (0, "0 %"),
        (0.872, "87 %"),
        (0.0234, "2.3 %"),
        (0.0004, "under 0.1 %"),
        (1, "100 %"),
    ],
)
def test_percent(share, text):
    assert words.percent(share) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (None, "all ranks"),
        ([], "no rank in particular"),
        ([1], "rank 1"),
        ([0, 1, 2, 5], "ranks 0–2, 5"),
        ([4, 3], "ranks 3, 4"),
    ],
)
def test_rank_names(ranks, text):
    assert words.rank_names(ranks, "all ranks") == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ms", "not recorded"),
        (True, "", "yes"),
        (0, "", "0"),
        (2.0, "", "2"),
        (2.5, "", "2.50"),
        (26214400, "bytes", "25 MiB"),
        (0.5, "share", "50 %"),
        (1.9, "GB/s", "1.90 GB/s"),
        (["a", 2], "", "a, 2"),
        ([], "", "none"),
        (float("nan"), "GB/s", "nan GB/s"),
        ({"1": 3.928, "4": 55.0}, "ms", "rank 1: 3.93 ms, rank 4: 55.0 ms"),
        (7.0, "version", "7.0"),
        ({"1": 55}, "steps", "rank 1: 55 steps"),
    ],
)
def test_quantity(value, unit, text):
    assert words.quantity(value, unit) == text


def test_backticks_become_code_and_an_odd_one_stays():
    assert words.split_code("set `n=0` now") == [("set ", False), ("n=0", True), (" now", False)]
    assert words.split_code("an ` alone") == [("an ` alone", False)]


def test_units_stay_with_their_numbers_and_facts_have_words():
    assert words.nonbreaking_units("12 ms of 3 steps, 5 % of it") == "12\u00a0ms of 3 steps, 5\u00a0% of it"
    assert words.fact("gpu.kernels_per_step") == "GPU: kernels per step"


def test_strip_zeros_removes_only_trailing_decimals():
    assert [words.strip_zeros(text) for text in ("60.0 ms", "0.50 s", "100 %", "1.05 GiB")] == [
        "60 ms",
        "0.5 s",
        "100 %",
        "1.05 GiB",
    ]
