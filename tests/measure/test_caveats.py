"""What is said of recordings that tell little."""

from __future__ import annotations

import pytest

from tests.measure.recorded import Job, measured, record


@pytest.mark.parametrize(("steps", "few"), [(5, True), (30, False)])
def test_how_little_of_a_run_was_seen(steps, few, tmp_path):
    _, notes = measured(record(tmp_path / "run", Job(steps=steps)))
    assert any(note.startswith("Only ") and "measured" in note for note in notes) == few
