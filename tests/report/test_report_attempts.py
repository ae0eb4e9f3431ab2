"""The table of attempts."""

from __future__ import annotations

import msgspec
import pytest
import samples

from ddpdoctor.measure.runfacts import AttemptFacts
from ddpdoctor.report.tables import attempts_table


@pytest.mark.parametrize(
    ("first_step", "steps", "saved"), [(1160, "1,160 – 1,229", "step 1,200"), (None, "70", "step 40")]
)
def test_steps_and_checkpoint_of_an_attempt_have_one_count(first_step: int | None, steps: str, saved: str):
    attempts = [
        AttemptFacts(number=1, steps=90),
        AttemptFacts(number=2, first_step=first_step, steps=70, checkpoint_step=40),
    ]
    facts = {"run": {"attempts": msgspec.to_builtins(attempts)}}
    table = attempts_table(msgspec.structs.replace(samples.minimal(), facts=facts))
    assert table is not None
    assert [table.rows[1][table.head.index(name)] for name in ("steps", "last checkpoint")] == [
        steps,
        saved,
    ]
