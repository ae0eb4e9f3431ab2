"""What is written down of calls while they run: numbers by process group, and when the same was called before."""

from __future__ import annotations

import json
from typing import Any

from ddpdoctor.hook.recording.crash_records import Calls
from ddpdoctor.rundir import CALL_SLOTS, OWN_SLOTS, lines_of_calls

SUM, GRADIENTS = '"k":"coll","op":"all_reduce","pg":"0"', '"k":"bwd","pg":"0"'


class Memory:
    """What a spool gives to write in."""

    def shared(self, name: str, size: int) -> memoryview:
        self.memory = bytearray(size)
        return memoryview(self.memory).cast("q")

    def rows(self) -> list[dict[str, Any]]:
        lines = lines_of_calls(bytes(self.memory)).splitlines()
        return sorted(map(json.loads, lines), key=lambda row: row["call"])


def test_calls_of_a_group_are_numbered_whoever_issues_them() -> None:
    memory = Memory()
    calls = Calls(memory)  # type: ignore[arg-type]
    calls.end(calls.begin(calls.recurring(GRADIENTS, "0"), 0, own=True))
    calls.end(calls.begin(calls.recurring(SUM, "0"), 0))
    calls.begin(calls.recurring('"k":"coll","op":"isend","pg":"0"', None), 0)
    calls.end(calls.begin(calls.recurring(SUM.replace('"0"', '"1"'), "1"), 1))
    calls.begin(calls.recurring(SUM, "0"), 1)
    rows = memory.rows()
    assert [row.get("n") for row in rows] == [1, 2, None, 1, 3]
    assert [row["open"] for row in rows] == [0, 0, 1, 0, 1]
    assert [(row.get("p"), row.get("pp")) for row in rows][-1] == (2, 0)


def test_what_ddp_issues_in_every_step_pushes_out_no_call_from_python() -> None:
    memory = Memory()
    calls = Calls(memory)  # type: ignore[arg-type]
    calls.end(calls.begin(calls.recurring(SUM, "0"), 0))
    for step in range(3 * OWN_SLOTS + CALL_SLOTS):
        calls.end(calls.begin(calls.recurring(GRADIENTS, "0"), step, own=True))
    rows = memory.rows()
    assert (len(rows), rows[0]["k"]) == (1 + OWN_SLOTS, "coll")
    last = rows[-1]["n"]
    assert (rows[-1]["p"], rows[-1]["pp"]) == (last - 1, last - 2)
