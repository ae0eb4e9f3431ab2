"""The trainings of a run that takes several in the same processes, as facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ddpdoctor.measure.runfacts import RunFacts, TrainingFacts
from ddpdoctor.measure.steplog import Training


def with_trainings(
    run: RunFacts, trainings: Sequence[Training], measured: int, findings: Mapping[int, str]
) -> RunFacts:
    """The facts of the ``measured`` training, by its number, with a list of all; its goodput is that of the steps of all. ``findings``:
    the rule of the first finding in each other training that was diagnosed, by number; "" if it has none."""
    if not trainings:
        return run
    goodput = run.goodput
    if goodput is not None and run.wall_s:
        others_s = sum(each.steps_s for each in trainings if each.number != measured)
        goodput = min(goodput + others_s / run.wall_s, 1.0)
    return replace(
        run,
        goodput=goodput,
        trainings=[
            TrainingFacts(
                number=each.number,
                is_measured=each.number == measured,
                first_step=each.first_step,
                steps=each.steps,
                total_s=each.length_ns / 1e9,
                step_ms=1e3 * each.step_s,
                models=[str(module.get("module")) for module in each.modules if module.get("module")],
                parameters_bytes=sum(module.get("parameters_bytes") or 0.0 for module in each.modules)
                or None,
                finding=findings.get(each.number),
            )
            for each in trainings
        ],
    )
