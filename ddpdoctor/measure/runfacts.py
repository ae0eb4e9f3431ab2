"""Facts of the whole run: its wall time (the family ``run``), its memory (``memory``), and how it stopped (``hang``). See :mod:`.facts`.

``measure/wholerun/``, ``measure/memory/`` and ``ddpdoctor/stall/`` find them.
"""

from __future__ import annotations

import msgspec

from .places import CodeLine, Where


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
    optimizer), "compute" (forward, backward or optimizer), "communication" (all ranks in a collective); null where nothing shows it. On
    GPUs without device times, only "data" and "checkpoint" are known: elsewhere a host may wait for its device, and so for other ranks."""
    in_all_phases: bool | None = None
    """Whether forward, backward and optimizer take longer by similar ratios, as on a machine that gets slower; null where the kind of work
    is neither computation nor communication, or a phase was not recorded."""
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


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that grows throughout the run, after the warm-up and through every evaluation and pass over the data: no plateau, and
    nothing released. The numbers are those of the rank that grows fastest."""

    ranks: list[int] = []
    """Ranks that grow."""
    fastest_rank: int | None = None
    bytes_per_step: float
    bytes_per_hour: float
    """The same per hour, at the rank's step time while it was watched."""
    low_bytes_per_hour: float
    """Lower end of the 90 % interval of the slope."""
    high_bytes_per_hour: float
    grown_bytes: float
    """Growth while it was watched."""
    held_bytes: float
    """Memory in use at the end."""
    free_bytes: float | None = None
    """Free memory then, of the host or its control group's limit, or of the device."""
    full_in_hours: float | None = None
    """Hours until that is used up if all ranks of the host, or the device, continue to grow like this."""
    may_be_cache: bool = False
    """Whether a dataset that caches what it has read would look the same so far: it is in the process that grows, and the passes over
    the data were too few to decide."""
    ends_with_pass: bool = False
    """Whether it is in workers that end with the pass over the data, as a DataLoader's do without persistent_workers, and then release
    it."""
    bounded_bytes: float | None = None
    """Largest further growth on the host that is full first, if it is such a cache (bounded by the dataset) or ends with the pass; null
    if the length of a pass is unknown, or neither bounds it."""
    bound_fits: bool | None = None
    """Whether that much is free there; null where either is unknown."""


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the ranks' processes, their loaders' workers and their devices. Pages of files do not count: the kernel reclaims them."""

    watched_hours: float | None = None
    """For how long the processes' memory was watched after the warm-up; null where that was too short to detect growth."""
    process: Growth | None = None
    """Ranks' own processes that grow; null where none does."""
    workers: Growth | None = None
    """Ranks whose child processes grow, all together: the loader's workers, where it has some."""
    device_watched_hours: float | None = None
    """For how long the devices' memory was watched."""
    device: Growth | None = None
    """Ranks whose tensors on the device grow."""
    on_device: bool | None = None
    """Whether the following amounts are of the ranks' devices, by torch's counters; else of the ranks' processes with their workers."""
    most_bytes: float | None = None
    """Peak memory of any rank."""
    typical_bytes: float | None = None
    """Median of the other ranks' peaks; null for a single rank."""
    heaviest_rank: int | None = None
    heavy_ranks: list[int] | None = None
    """The rank with the highest peak, and those with at least half of its excess over the others; empty where none has any."""
    limit_bytes: float | None = None
    """Memory of the smallest device, or of the tightest host or its control group."""
    headroom_bytes: float | None = None
    """Memory that was never used, per rank: on the fullest device, by torch's peak of reserved memory and NVML's; for a job on CPUs the
    rank's part of what its host never used."""
    headroom_share: float | None = None
    """Share that was never used of the fullest device's, or the tightest host's, memory."""
    batch_times: float | None = None
    """Upper bound of the factor by which the batch can grow in the devices' memory, if all memory allocated and freed within a step
    grows with it. Null on CPUs."""
    allocated_peak_bytes: float | None = None
    """Peak memory of tensors on the device, on the rank with the most."""
    reserved_peak_bytes: float | None = None
    """Peak memory reserved by PyTorch's caching allocator on the device, on the rank with the most."""
    allocation_retries: float | None = None
    """How often the allocator found no memory, freed its cache and waited for the device, on the rank with the most."""
    lasting_retries: float | None = None
    """How often in the second half of the readings, on the rank with the most then."""
    steps_per_retry: float | None = None
    """Steps between them, on average; null without any, or where the steps are unknown."""


class StopFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One reason for which a job stopped, and the ranks at fault."""

    ranks: list[int] | None = None
    """Ranks that the finding names, never those that only wait; null if they cannot be distinguished from the others."""
    arrival_unknown: bool | None = None
    """Whether others may wait for ``ranks``, but no dump shows that these did not arrive, because they left none; null if not."""
    waiting_ranks: list[int] = []
    """Ranks that wait, in ``collective`` if one is named."""
    group: str | None = None
    """Process group of that collective (torch's description, and the group's name in parentheses)."""
    collective: str | None = None
    """Collective in which they wait: ``all_reduce``, ``barrier``, ..., as torch's flight recorder names it."""
    sequence: int | None = None
    """Number of the collective in its group."""
    tensors: str | None = None
    """Input of the collective, sizes and type: ``2048x5120 BFloat16``."""
    unlike: str | None = None
    """What the ranks at fault called instead, under the same number."""
    kind: str | None = None
    """Kind of difference, death or error, in one word."""
    fault: str | None = None
    """What failed in an error of a device: "program" (a kernel: a failed assertion, an invalid access) or "hardware" (the GPU, its links
    or driver); null if unknown, or for other reasons."""
    doing: str | None = None
    """What the ranks at fault do, in a word: ``lock``, ``storage``, ``loop``, ...; ``oversized`` if a rank asked for more memory than its
    device has. Null if nothing shows it."""
    says: str | None = None
    """What a rank at fault does, as part of a sentence: ``waits for a lock``."""
    message: str | None = None
    """Error message: the exception, or the device's error."""
    since: str | None = None
    """When the first waiting rank reached the collective, by its host's clock."""
    since_s: float | None = None
    """Time without progress, when last checked."""
    step: int | None = None
    """Step in which the first of them stopped."""
    where: list[Where] = []
    """Line at which each of them is, or was last seen, with its callers."""
    waits_at: list[Where] = []
    """Line at which the other ranks wait."""
    evidence: list[str] = []
    """Observations, a sentence each."""


class HangFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A job that hangs or hung, a rank that died or raised."""

    looked: bool | None = None
    """Whether the input can show a hang: a recorded run, or flight recorder dumps."""
    only_dumps: bool | None = None
    """Whether the input has flight recorder dumps alone, which show collectives, and not how a rank ended; null if not."""
    undecided: str | None = None
    """Why flight recorder dumps do not show for which rank others wait, as part of a sentence; null if they do, or if no rank waits."""
    state: str | None = None
    """"hangs" (when last checked) or "failed" (it ended, not in order); null if neither."""
    lasts: bool | None = None
    """Whether it still hung when last checked, so that its processes can be inspected; null if unknown."""
    until: str | None = None
    """What ended a job that hung, as words that follow "until": "SIGTERM ended it". Null if it still hangs, or if that is unknown."""
    since_s: float | None = None
    """Time without progress, when last checked."""
    step: int | None = None
    """The last step that any rank was in."""
    exit_code: int | None = None
    """Exit code of the job, if not 0."""
    hidden: bool | None = None
    """Whether the job failed although its exit code is 0; null if it did not."""
    not_reached: StopFacts | None = None
    """A rank did not reach a collective at which others wait."""
    different: StopFacts | None = None
    """Ranks called different collectives."""
    uneven: StopFacts | None = None
    """A rank ran out of batches, and others did not."""
    unused_parameter: StopFacts | None = None
    """A rank's backward pass skipped parameters that others reduce."""
    died: StopFacts | None = None
    """A rank's process ended without a Python exception: a signal, or an exit code."""
    raised: StopFacts | None = None
    """A rank raised an uncaught exception."""
    device: StopFacts | None = None
    """A rank's device failed."""
    worker: StopFacts | None = None
    """A worker process of a rank's DataLoader was killed."""
    rendezvous: StopFacts | None = None
    """All ranks present wait for a process group to be created."""
    together: StopFacts | None = None
    """All ranks are stuck in the same collective: the link, or one of their devices."""
    unexplained: StopFacts | None = None
    """It stopped, and nothing shows which rank is at fault."""
    effects: list[str] = []
    """Effects on other ranks, a sentence each."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank was last seen."""

    rank: int
    host: str | None = None
    guilty: bool = False
    """Whether a finding names this rank."""
    step: int | None = None
    """Its current step."""
    phase: str | None = None
    """The phase of the step, in words."""
    collective: str | None = None
    """The collective in which it waits, else the first one that it issued and that is not finished, else the last one, with group and
    number."""
    state: str | None = None
    """What it does there, if known, or how it ended."""
    since_s: float | None = None
    """For how long, when last checked."""
    where: Where | None = None
    """The line of the user's program."""
    stack: list[CodeLine] = []
    """Stack of its training thread, the innermost line first."""
