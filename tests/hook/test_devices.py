"""CUDA events, on a device that is not there: what is recorded, that nothing waits, and that no graph gets one."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.guard import Part
from ddpdoctor.hook.recording import Session

from .recording import JOBS, HookOptions, Recorded, forked, run_recorded

devices = sys.modules[Session.__module__].devices_of.__globals__
MARKS = ["fwd", "fwd_end", "bwd", "ready", "bwd_end", "opt", "opt_end", "end"]


def recorded(tmp_path, *options: str) -> Recorded:
    command = forked("fake_cuda.py", "--marks", str(tmp_path / "marks"), *options)
    found = run_recorded(tmp_path, command, HookOptions(profile_steps=None))
    assert found.process.returncode == 0, found.process.stderr
    assert found.info(0)["hook"]["errors"] == found.info(1)["hook"]["errors"] == []
    return found


@pytest.mark.torchrun
def test_events_tell_when_the_device_worked(tmp_path) -> None:
    job = recorded(tmp_path, "--steps", "60")
    for rank in (0, 1):
        passed = json.loads((tmp_path / f"marks.{rank}").read_text())
        found = [line for line in job.lines(rank) if "device" in line]
        # Step 0 begins before the device is first used, at the process group's start.
        assert [line["device"] for line in found] == list(range(1, 60))
        whole = found[1:]
        assert all([name for name, _ in line["times"]] == MARKS for line in whole)
        # As the stream's own times say, on a clock that is 50 ppm fast and begins with the first event.
        origin = whole[0]["at"] - 0
        truth = iter(
            passed["passed"][-len(whole) * len(MARKS) - 1 :],
        )
        first = next(truth)
        for line in whole:
            for _, ns in line["times"]:
                assert abs((line["at"] + ns - origin) - (next(truth) - first) * 1.00005) < 5_000
        # The others' gradients are waited for after one's own.
        assert all(line["times"][4][1] - line["times"][3][1] > 1.4e6 for line in whole)
        # Four steps at most are under way in this job: the events of more than those are used again.
        assert passed["made"] <= 6 * (len(MARKS) + 1)


@pytest.mark.torchrun
@pytest.mark.slow
def test_no_event_is_recorded_into_a_graph(tmp_path) -> None:
    job = recorded(tmp_path, "--steps", "40", "--capture", "20")
    for rank in (0, 1):
        found = [line["device"] for line in job.lines(rank) if "device" in line]
        # The step after it begins while the graph is still being captured.
        assert found == [step for step in range(1, 40) if step not in (20, 21)]
        assert [step["step"] for step in job.steps(rank)] == list(range(40))


def test_whether_there_is_a_gpu_is_not_asked_before_the_job_uses_it(tmp_path) -> None:
    code = (
        "import runpy, sys, torch\n"
        "torch.cuda.is_available = lambda: print('CUDA can no longer be used in forked children')\n"
        "runpy.run_path(sys.argv[1])\n"
    )
    (tmp_path / "job.py").write_text(code)
    command = forked(tmp_path / "job.py", str(JOBS / "single.py"), ranks=0)
    job = run_recorded(tmp_path, command, HookOptions(profile_steps=(2, 4)))
    assert job.process.stdout == "single done\n"
    assert job.info(0)["window"]["state"] == "saved"


def test_whether_a_step_is_done_is_read_from_its_events(monkeypatch) -> None:
    """A device that has failed has done nothing, as far as is known, and raises into nobody."""
    pytest.importorskip("torch")
    monkeypatch.setitem(devices, "_PART", Part("events of this test"))

    def event(has_passed: bool) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: has_passed, elapsed_time=lambda later: 1.0)

    def failed() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    found = devices["Devices"](SimpleNamespace(pending=[]))
    assert not found.has_finished(14), "no events were recorded"
    found._waiting += [(step, [("start", event(True)), ("end", event(step == 14))]) for step in (14, 15)]
    found._cuda = SimpleNamespace(is_current_stream_capturing=lambda: True)
    assert not found.has_finished(14), "not even a query is allowed now"
    found._cuda = SimpleNamespace(is_current_stream_capturing=lambda: False)
    assert found.has_finished(14) and not found.has_finished(15)
    found._cuda = SimpleNamespace(is_current_stream_capturing=failed)
    assert found.has_finished(14) and not found.has_finished(15)
