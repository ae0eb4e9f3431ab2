"""The facts ``run``: where the wall time of the whole run went, and single pauses."""

from __future__ import annotations

import msgspec

from .places import Where


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that are unlike the others in one way: single pauses, a period, a change, growth."""

    steps: list[int] = []
    """Numbers of these steps; of a change and of growth the first and the last one."""
    longer: list[int] = []
    """[first, last] of the steps that are longer."""
    persistence: str | None = None
    """"once", "periodic", "range" or "growing"."""
    total_s: float
    """Seconds by which they took longer than usual, together; of a change, the slower steps than those on the other side of it."""
    longest_s: float = 0.0
    """Seconds of the longest one."""
    share: float | None = None
    """Share of the run's wall time, or of the recorded part of it where a launcher's start or end is unknown."""
    every: int | None = None
    """Distance in steps between two of a period."""
    hits: int | None = None
    """How many of the steps at that distance are long."""
    chances: int | None = None
    """How many steps there are at that distance."""
    before_ms: float | None = None
    """Median step time before a change, or at the beginning of the growth."""
    after_ms: float | None = None
    """Median step time after a change, or at the end of the growth."""
    ranks: list[int] | None = None
    """The ranks that took longer while the others waited; null where all did, or it is unknown which."""
    kind: str | None = None
    """Kind of work that took the time there: "data" (the wait for a batch), "checkpoint", "host" (code outside forward, backward and
    optimizer), "compute" (forward, backward or optimizer), "communication" (all ranks in a collective); null where nothing shows it."""
    off_cpu: bool | None = None
    """Whether the training thread was neither running nor runnable for most of it; null where the scheduler was not read."""
    where: list[Where] = []
    """The lines."""


class AttemptFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a run that was restarted."""

    number: int
    """From 1, in the order in which they started."""
    is_measured: bool = False
    """Whether the steps of this one are measured."""
    started_s: float | None = None
    """Seconds from the launcher's start until its process group was there."""
    ended_s: float | None = None
    """Seconds from the launcher's start until the last of its ranks had ended."""
    world_size: int | None = None
    steps: int = 0
    """Steps that it took."""
    first_step: int | None = None
    """Number of its first step in the job, counted from the first attempt's first step: it goes on from the last checkpoint. null where no
    attempt was seen to save or load one, or attempts before are not in the recording."""
    step_ms: float | None = None
    """Median step time."""
    checkpoint_step: int | None = None
    """Its last step in which a checkpoint was saved, counted from its own first step; null if none was seen."""
    ranks: list[int] = []
    """Ranks that ended it by failing."""
    ended: str = ""
    """How it ended, in words."""
    where: list[Where] = []
    """The line at which it failed."""
    finding: str | None = None
    """Rule of the first finding in a diagnosis of this attempt alone; "" if it has none, null if it was not diagnosed."""


class TrainingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One of several trainings in the same processes, each with a process group of its own."""

    number: int
    """From 1, in order."""
    is_measured: bool = False
    """Whether the steps of this one are measured."""
    first_step: int
    """Number of its first step, counted from the first step of the process."""
    steps: int
    """Steps that it took."""
    total_s: float
    """From its first step's beginning to its last step's end, seconds."""
    step_ms: float
    """Median step time."""
    models: list[str] = []
    """Class names of the models that DDP wraps in it."""
    parameters_bytes: float | None = None
    """Size of their parameters; null without DDP."""
    finding: str | None = None
    """Rule of the first finding in a diagnosis of this training alone; "" if it has none, null if it was not diagnosed."""


class RestartFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the restarts of a run cost, in seconds of the run."""

    count: int
    """How many attempts failed and were followed by another one."""
    ranks: list[int] = []
    """Ranks that ended the last of these."""
    ended: str = ""
    """How it ended, in words."""
    where: list[Where] = []
    """The line at which it failed."""
    repeated_steps: int | None = None
    """Steps after the last checkpoint of each, which the next attempt took again; null if no checkpoint was seen in any."""
    repeated_s: float | None = None
    """What these took."""
    detection_s: float | None = None
    """From the first failed rank until all ranks had ended."""
    start_s: float | None = None
    """From there until the next attempt's first step had ended."""
    total_s: float = 0.0
    """All of these together, as far as known."""


class RunWork(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations, or checkpoints, between the first step and the last one."""

    count: int
    """Steps in which it happens."""
    total_s: float
    """Seconds by which it makes these steps longer, together."""
    share: float | None = None
    """Share of the run's wall time; null where that is unknown."""
    every: int | None = None
    """Median distance in steps from one to the next; null with only one."""
    ranks: list[int] | None = None
    """The ranks that do it while the others wait; null where all do."""
    where: list[Where] = []
    """The lines."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The wall time of the run from the launcher's start to its end, in seconds: the mean over the ranks."""

    wall_s: float | None = None
    """All of it; null where no launcher recorded its start and end."""
    steps: int | None = None
    """Number of steps of the job."""
    goodput: float | None = None
    """Share of it that the job's steps would take if each took the usual time."""
    start_s: float | None = None
    """From the launcher's start until the process group was there: interpreter, imports, rendezvous."""
    joining_s: float | None = None
    """The last part of that: from the moment at which the first rank called init_process_group; null where a rank did not record it."""
    last_ranks: list[int] | None = None
    """The ranks that called init_process_group last, when others had waited in it for at least 1 s; null: all at about the same time,
    or unknown."""
    earlier_attempts_s: float | None = None
    """The same of ranks that an elastic launcher restarted: earlier attempts, and the start of this one."""
    preparation_s: float | None = None
    """From there until the first batch was requested: the model, DDP's constructor, the dataset, a restored checkpoint."""
    preparation_where: list[Where] = []
    """Lines at which a rank was longest between the process group and the first batch, with their shares of the stack samples there."""
    preparation_ranks: list[int] | None = None
    """The ranks that were at the first of these lines while the others waited; null: all ranks, or unknown."""
    first_batch_s: float | None = None
    """The wait for the first batch."""
    warm_up_s: float | None = None
    """What the first steps took longer than usual ones."""
    steps_s: float | None = None
    """Ordinary steps."""
    some_steps_s: float | None = None
    """What the periodic steps, such as every tenth, took longer."""
    epochs_s: float | None = None
    """What steps took longer in which a pass over a loader began or ended."""
    evaluation_s: float | None = None
    """What steps with an evaluation took longer, without checkpoints and the start of a training loader in them."""
    checkpoint_s: float | None = None
    """What steps took longer in which a rank saved or loaded a checkpoint."""
    pauses_s: float | None = None
    """What single long steps took longer."""
    suspended_s: float | None = None
    """What steps took longer in which a rank was stopped from outside."""
    profiler_s: float | None = None
    """What steps took longer in which a profiler was opened, closed or saved."""
    unrecorded_s: float | None = None
    """Between steps of which some were not recorded."""
    other_trainings_s: float | None = None
    """Before the first step and after the last one of the measured training, where its processes have had other trainings there."""
    later_attempts_s: float | None = None
    """From the last step of the measured attempt to the launcher's end, if other attempts followed."""
    end_s: float | None = None
    """From the last step's end to the launcher's end."""
    exit_s: float | None = None
    """The last part of that: after the process group was destroyed; the exit of the ranks and the launcher."""
    end_where: list[Where] = []
    """Lines at which a rank was longest after its last step, with their shares of the stack samples there; none are taken after the
    process group was destroyed."""
    end_ranks: list[int] | None = None
    """The ranks that were at the first of these lines while the others waited; null: all ranks, or unknown."""
    evaluation: RunWork | None = None
    """Evaluations; null where no step has one."""
    checkpoints: RunWork | None = None
    """Checkpoints; null where no step has one. Those before the first step and after the last one do not count."""
    attempts: list[AttemptFacts] = []
    """All attempts, if there are several: an elastic launcher restarts the ranks when one dies."""
    trainings: list[TrainingFacts] = []
    """All trainings, if the same processes take several one after the other, each with a process group of its own."""
    restarts: RestartFacts | None = None
    """null if no attempt failed and was followed by another one."""
    pause: RunEvent | None = None
    """One or two single steps that took far longer than the others. They are excluded from the measured steps."""
    periodic: RunEvent | None = None
    """Every n-th step is longer; null where no period is found."""
    change: RunEvent | None = None
    """The step time changed at one step, for good or until the next change: the largest such change; null without one."""
    growth: RunEvent | None = None
    """Steps get longer throughout the run; null where they do not."""
