"""The run directory: what a recorded run looks like on disk (schema ``ddpdoctor.run/1``).

Standard library only and Python 3.9 or newer, because the hook inside the job's own interpreter uses it too.
Every file can be read while it is being written and after a ``kill -9``: JSON documents are replaced as a
whole, and so is the step log of a long job when it is thinned; otherwise JSON-lines files only ever grow.

::

    RUN/manifest.json                       the first launcher's record: command, versions, environment, options
    RUN/hosts/<host>/launch-<pid>.json      the same, of each launcher
    RUN/hosts/<host>/telemetry.jsonl        NVML and host samples
    RUN/ranks/<rank:05d>/                   one recording of one rank; a further attempt of it is <rank:05d>.1, .2 ...
        rank.json                           identity and settings of this rank
        steps.jsonl                         one line a step
        samples.jsonl                       samples of the training thread's source line
        workers.jsonl                       what its data loader's workers did, and samples of their source lines
        memory.jsonl                        samples of the memory of its tensors on its device
        trace.json.gz                       the profiler window
        trace.1.json.gz, ...                windows that were requested while the job ran
        flight.json                         torch's flight recorder at the window's end
        progress.json, standing.json, hang_flight.json, faults.txt, ending.json, calls.jsonl
                                            status files of a rank that stopped, see ``stops``
    RUN/hosts/<host>/stall.json, ends.json                                              the launcher's view of the same
    RUN/diagnosis.json, RUN/report.html     written by the analysis

``docs/formats.md`` describes the fields.

::

    formats     layout, stepevents, phases, notes, typed (types of fields), run_id
    writing     spool, segments, workers, heartbeat, calls_page, raw_traces, sources, unjoined (before init_process_group)
    copying     draining, handover, hostdocs, compaction, host_lock (which process copies), waiting (what is not copied yet)
    live ranks  requests, presence
    ends        liveness, ends (how a job and its ranks ended), fault_text (what faulthandler wrote of them)
    reading     reader, attempts, stops
    files       files, owned
    masking     privacy, named, secretnames, tokens, packages (library paths)
"""

from typing import TYPE_CHECKING

from ..deferred import deferred
from .calls_page import CALL_SLOTS, CALLS_PAGE, OWN_SLOTS, Call, CallsPage, lines_of_calls
from .compaction import DiskBudget, rank_budget
from .draining import PATIENCE_S, BusyError, discard, drain, recover, spools_in
from .files import (
    bounded_lines,
    folders_in,
    is_hollow,
    is_regular,
    listed,
    open_regular,
    parsed,
    ranks_in_words,
    read_bounded,
    read_json,
    reading,
    runs_of,
    write_json,
)
from .handover import (
    CAPTURE_ANSWER,
    CAPTURE_ORDER,
    RAW_FILE,
    STACKS_FILE,
    STACKS_QUESTION,
    TooLargeError,
)
from .heartbeat import ENDS_AT, ENDS_MASK, HEARTBEAT_FILE, STEPS_AT, Beat, Heartbeat, HeartbeatReader
from .host_lock import HANG_MONITOR, HostLock, copier_lock_is_held, remove_root
from .hostdocs import copy_host_documents, host_document, keep_host_document
from .layout import (
    ASKED_FILE,
    CALLS_FILE,
    DIAGNOSIS_FILE,
    ENDING_FILE,
    ENDS_FILE,
    FAULTS_FILE,
    FLIGHT_FILE,
    HANG_FLIGHT_FILE,
    MANIFEST_FILE,
    MEMORY_FILE,
    MEMORY_SCHEMA,
    MOST_CAPTURES,
    PROGRESS_FILE,
    RANK_FILE,
    RANK_SCHEMA,
    REPORT_FILE,
    RUN_SCHEMA,
    SAMPLES_FILE,
    STALL_FILE,
    STANDING_FILE,
    STEPS_FILE,
    STEPS_SCHEMA,
    TARGET_FILE,
    TELEMETRY_FILE,
    TELEMETRY_SCHEMA,
    TRACE_FILE,
    WORKERS_FILE,
    FilesBelow,
    closed_folders,
    files_below,
    host_directory,
    is_recorded_file,
    is_run_directory,
    run_directories,
    run_of,
    target_of,
)
from .liveness import State, boot_id, is_over, last_change_s, pid_namespace, writer_of
from .notes import Note, NoteCode, recorded_notes
from .owned import UntrustedFileError, encoded, file_identity, make_private_folder, private_folder
from .phases import LONG_PHASES, OWN_PHASES, WAITING_PHASES, Phase, phase_words, waits_for_others
from .requests import (
    CAPTURE_SCHEMA,
    MOST_CAPTURE_STEPS,
    CaptureRequest,
    answer_of,
    ask,
    capture_requested,
    delete_requests,
    new_request,
    request_capture,
    request_in,
)
from .run_id import OtherRunError, id_of_root, new_run_id, refuse_other_run, run_id
from .spool import Spool, make_spool_root, own_roots_prefix, roots_of, spool_root
from .stepevents import (
    HELD_NS,
    CallField,
    EventField,
    EventKind,
    LineField,
    Mark,
    WorkerField,
    brief_lines,
    renamed,
)
from .stops import (
    ASKED_SCHEMA,
    ENDING_SCHEMA,
    ENDS_SCHEMA,
    PROGRESS_SCHEMA,
    STALL_SCHEMA,
    STANDING_SCHEMA,
    End,
    Standstill,
    Stops,
    read_stops,
)
from .waiting import Waiting, reason_of, unsaved_sentence, waiting_in
from .workers import accept_workers, append_lines, recorded_s, spool_of_process

if TYPE_CHECKING:
    from .presence import Present, launcher_runs, living_ranks, present_ranks
    from .reader import RankRecord, RunDirectory, UnknownAttemptError, read_manifest, read_rank
    from .sources import hash_of, note_sources, parsed_python, read_sources, source_bytes
    from .typed import fitting


__getattr__ = deferred(
    __name__,
    {
        "presence": "Present launcher_runs living_ranks present_ranks",
        "reader": "RankRecord RunDirectory UnknownAttemptError read_manifest read_rank",
        "sources": "hash_of note_sources parsed_python read_sources source_bytes",
        "typed": "fitting",
    },
)
