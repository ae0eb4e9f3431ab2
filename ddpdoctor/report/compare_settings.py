"""Finds differences between two jobs: those that make them incomparable, and all others."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.diagnose.facts_view import lookup
from ddpdoctor.report import words
from ddpdoctor.report.job_view import BUILT_AT, command_line, settings_groups

_BATCH_TOLERANCE = 0.01
"""Batch sizes that differ by a smaller share count as equal, because a shorter last batch changes the mean a little."""
_MICRO_BATCH_TOLERANCE = 0.1
"""The mean number of micro-batches is rounded if it differs from an integer by at most this share. A few steps with fewer
micro-batches, for example if accelerate synchronises at the end of an epoch, hardly change the median step."""
_RUN_VARIABLES = re.compile(
    r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_(RUN_ID|ERROR_FILE|RESTART_COUNT|USE_AGENT_STORE)|TORCH_FR_DUMP_TEMP_FILE"
    r"|SLURM_(JOB_?ID|STEP_ID|PROCID|LOCALID|NODEID|RESTART_COUNT)"
    r"|(LOCAL_|NODE_|GROUP_|ROLE_)?RANK|MPI_LOCALRANKID|PMIX?_\w*(RANK|NAMESPACE|PORT|ID|FD|URI\d*)|OMPI_COMM_WORLD_\w*RANK|NCCL_COMM_ID"
)
"""Variables that differ between any two runs of a job: addresses, ports, ids, temporary files."""
_MAX_CHANGES = 60


class Change(msgspec.Struct, frozen=True):
    """A difference between the two sides, as text; "not recorded" for a side without the value."""

    what: str
    before: str
    after: str


def size_differences(before: Diagnosis, after: Diagnosis) -> tuple[list[Change], list[str]]:
    """(Differences that make step times incomparable, notes on other limits of the comparison)."""
    differences, notes = [], []
    for what, old, new in (
        ("world size", before.job.world_size, after.job.world_size),
        ("batch size", batch_size(before), batch_size(after)),
        ("device", before.job.device, after.job.device),
        ("name of the device", sorted(set(before.job.device_names)), sorted(set(after.job.device_names))),
    ):
        if not old or not new:
            if bool(old) != bool(new):
                notes.append(
                    f"The {what} was recorded on one side only and is assumed to be the same on both."
                )
        elif not _is_same(old, new):
            differences.append(Change(what, _text(old), _text(new)))
    micro = [lookup(each.facts, "steps.micro_batches") or 1.0 for each in (before, after)]
    if not differences and abs(micro[0] - micro[1]) > _BATCH_TOLERANCE * max(micro):
        old, new = map(_text, micro)
        notes.append(
            f"On average, a step has {old} micro-batches before and {new} after, as where an epoch ends within an accumulation; most steps "
            "have the same number, and the median step is compared."
        )
    seen = [len(each.job.ranks_seen) for each in (before, after)]
    if all(seen) and seen[0] != seen[1] and before.job.world_size == after.job.world_size:
        notes.append(
            f"{words.count(seen[0], 'rank')} recorded before and {seen[1]} after: ranks without a recording are not compared."
        )
    models = [lookup(each.facts, "ddp.parameters_bytes") for each in (before, after)]
    if all(models) and models[0] != models[1]:
        old, new = (words.quantity(each, "bytes") for each in models)
        notes.append(
            f"The models differ ({old} of parameters before, {new} after): the step time may differ because of the model."
        )
    return differences, notes


def batch_size(diagnosis: Diagnosis) -> float | None:
    """Samples per rank in a usual step, including gradient accumulation; None if unknown."""
    facts = diagnosis.facts
    if (samples := lookup(facts, "steps.samples")) is not None:
        return float(samples)
    # Of an earlier version.
    size = lookup(facts, "steps.batch_size") or lookup(facts, "loader.batch_size")
    micro = float(lookup(facts, "steps.micro_batches") or 1.0)
    usual = micro if abs(micro - round(micro)) > _MICRO_BATCH_TOLERANCE * micro else float(round(micro))
    return float(size) * usual if size else None


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else words.quantity(value, "")


def _is_same(old: object, new: object) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= _BATCH_TOLERANCE * max(old, new)
    return old == new


def other_changes(before: Diagnosis, after: Diagnosis) -> list[Change]:
    """Differences of versions, settings, environment and command, at most :data:`_MAX_CHANGES`.

    A value that only one side has counts only if ddpdoctor recorded both sides, because traces contain few values.
    """
    old, new = _listed_values(before), _listed_values(after)
    both_recorded = bool(before.job.settings) and bool(after.job.settings)
    candidates = dict.fromkeys([*old, *new]) if both_recorded else [name for name in old if name in new]
    names = [name for name in candidates if old.get(name) != new.get(name)]
    return [
        Change(name, old.get(name, words.ABSENT), new.get(name, words.ABSENT))
        for name in names[:_MAX_CHANGES]
    ]


def _listed_values(diagnosis: Diagnosis) -> Mapping[str, str]:
    job = diagnosis.job
    listed = {"backend": job.backend or "", "command": command_line(job.command)}
    listed |= {f"version of {name}": version for name, version in job.versions.items()}
    for title, rows in settings_groups(job.settings):
        # The line that built an object is not a setting.
        listed |= {f"{title}: {name}": value for name, value in rows if name != BUILT_AT}
    listed |= {name: value for name, value in job.environment.items() if not _RUN_VARIABLES.fullmatch(name)}
    return {name: value for name, value in listed.items() if value}
