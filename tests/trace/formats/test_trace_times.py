"""Nanoseconds are exact, whatever the size of the numbers."""

import json
import random
from decimal import Decimal

import pytest

from ddpdoctor.trace import load_trace
from ddpdoctor.trace.formats.kineto import times
from tests.trace.trace_files import document, event, expected_rows, rows_of, write


@pytest.mark.parametrize("exponent", [0, 20, 41, 42])
def test_three_decimals_below_2_to_the_43_us(exponent):
    random.seed(exponent)
    whole = [random.randrange(2**exponent, 2 ** (exponent + 1)) for _ in range(20_000)]
    fraction = [random.randrange(1000) for _ in whole]
    values = [float(f"{w}.{f:03d}") for w, f in zip(whole, fraction, strict=True)]
    assert times.from_numbers(values).tolist() == [w * 1000 + f for w, f in zip(whole, fraction, strict=True)]


def test_a_double_that_lost_its_nanoseconds_is_refused():
    with pytest.raises(times.InexactTimesError):
        times.from_numbers([1_698_107_929_236_899.123])
    assert times.from_numbers([1_698_107_929_236_899, 5]).tolist() == [1_698_107_929_236_899_000, 5000]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"0", 0), (b"12.5", 12_500), (b"-1.001", -1001),
        (b"1234567890123456.789", 1_234_567_890_123_456_789),
        (b"1.698107929236899123e15", 1_698_107_929_236_899_123), (b'"3.25"', 3250), (b"7.1239", 7124),
        (b"null", times.MISSING_NS), (b"1e400", times.MISSING_NS), (b"[1]", times.MISSING_NS),
    ],
)  # fmt: skip
def test_digits(text, ns):
    assert times.from_text([text]).tolist() == [ns]


@pytest.mark.parametrize("most_decimals", [0, 1, 3, 4])
def test_digits_of_many_are_read_as_those_of_one(most_decimals):
    random.seed(most_decimals)
    texts = []
    for _ in range(2000):
        whole = random.choice(
            [random.randrange(1, 10), random.randrange(2**43, 2**51), -random.randrange(1, 10**15)]
        )
        decimals = random.randrange(most_decimals + 1)
        point = "." + "".join(random.choices("0123456789", k=decimals)) if decimals else ""
        texts.append(f"{whole}{point}".encode())
    exact = [int((Decimal(t.decode()) * 1000).to_integral_value()) for t in texts]
    assert times.from_text(texts).tolist() == exact
    texts[7:7] = [b"0", b"4700000000000000.001"]
    exact[7:7] = [0, times.MISSING_NS]
    assert times.from_text(texts).tolist() == exact


def test_an_epoch_file_with_fractions_keeps_every_nanosecond(tmp_path):
    random.seed(5)
    content = []
    for i in range(500):
        stamp_ns, length_us = 1_698_107_929_000_000_000 + i * 7919, random.randrange(10**6) / 1e3
        times_text = f'"ts": {stamp_ns // 1000}.{stamp_ns % 1000:03d}, "dur": {length_us}'
        content.append(json.dumps(event(f"op{i % 9}", 0, 0)).replace('"ts": 0, "dur": 0', times_text))
    text = json.dumps(document([])).replace(
        '"traceEvents": []', '"traceEvents": [' + ",\n".join(content) + "]"
    )
    text = text.replace('"baseTimeNanoseconds": 1790857026000000000', '"baseTimeNanoseconds": 0')
    trace = load_trace(write(tmp_path / "a.json", text))
    assert rows_of(trace) == expected_rows(text)
    assert trace.meta.clock == "epoch"


@pytest.mark.parametrize("whole", [0, 1, 10, 25])
def test_fractions_that_begin_in_the_midst_of_a_batch_lose_no_event(tmp_path, monkeypatch, whole):
    """Events become columns some at a time, and only some of them need their text."""
    monkeypatch.setattr("ddpdoctor.trace.formats.kineto.build._CHUNK_EVENTS", 10)
    texts = [f"16981079292{i:05d}" + ("" if i < whole else f".{i:03d}") for i in range(25)]
    lines = [
        json.dumps(event(f"aten::{i}", 0)).replace('"ts": 0', f'"ts": {ts}') for i, ts in enumerate(texts)
    ]
    trace = load_trace(write(tmp_path / "a.json", '{"traceEvents": [' + ",".join(lines) + "]}"))
    assert [trace.name_of(row) for row in range(trace.size)] == [f"aten::{i}" for i in range(25)]
    assert trace.start_ns.tolist() == [int(Decimal(ts) * 1000) for ts in texts]
