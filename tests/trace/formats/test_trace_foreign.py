"""Traces of other tools are refused, those of all vendors' PyTorch are read; events that say nothing are counted."""

import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import load_trace, load_traces
from ddpdoctor.trace.processes import read_one
from tests.trace.trace_files import document, event, write


def browser(name="RunTask", cat="toplevel"):
    return {"traceEvents": [{"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": 5, "dur": 3}]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({**browser(), "metadata": {"os-name": "Linux"}}, "is not a PyTorch profiler trace"),
        (browser("step 3", "blink.user_timing"), "is not a PyTorch profiler trace"),
        (
            {"traceEvents": [{"ph": "B", "name": "a", "ts": 1}]},
            "none of its events has a begin and a duration",
        ),
        ({**browser(), "otherData": {"producer": "ddpdoctor"}}, "is a timeline that ddpdoctor exported"),
    ],
)
def test_other_tools_traces_are_refused_by_name(tmp_path, content, says):
    path = write(tmp_path / "chrome.json", content)
    with pytest.raises(UnusableInput, match=rf"^{path} .*{says}"):
        load_trace(path)


def test_a_foreign_trace_does_not_cost_the_others(tmp_path):
    good = write(tmp_path / "rank0.json", document([event()]))
    foreign = write(tmp_path / "chrome.json", browser())
    loaded = load_traces([good, foreign])
    assert [trace.meta.source for trace in loaded.traces] == [good]
    assert [file for file, _ in loaded.failed] == [foreign]


@pytest.mark.parametrize(
    ("name", "cat"),
    [
        ("void k()", "kernel"),
        ("zeLaunch", "xpu_runtime"),
        ("hipLaunchKernel", "hip_runtime"),
        ("x", "privateuse1_runtime"),
        ("x", "hpu_op"),
        ("x", "Runtime"),
        ("Memcpy HtoD", "gpu_memcpy"),
        ("step", "python_function"),
        ("nccl:all_reduce", ""),
        ("aten::mm", None),
        ("ProfilerStep#3", "other"),
    ],
)
def test_every_vendors_traces_are_read_without_kinetos_keys(tmp_path, name, cat):
    assert load_trace(write(tmp_path / "t.json", browser(name, cat))).size == 1


def test_negative_durations_and_missing_names_are_counted(tmp_path):
    events = [event(), event(dur=-5.0), event(dur=None), event(name=None), {**event(), "args": None}]
    path = write(tmp_path / "rank1.json", document(events))
    trace = load_trace(path)
    assert trace.size == 5 and trace.duration_ns.min() == 0
    assert [note.removeprefix(f"{path}: ") for note in trace.meta.notes] == [
        "2 event(s) without a usable duration (such as a negative one) count as instants.",
        "1 event(s) without a name: what they did is unknown.",
    ]


def test_an_event_that_is_nested_too_deeply_is_told_in_words(tmp_path):
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    path = write(tmp_path / "t.json", f'{{"traceEvents": [{{"ph": "X", "ts": 1, "args": {deep}}}]}}')
    assert read_one(path, None, False) == (None, f"{path} cannot be read: it is nested too deeply.")
