"""The run directory: files of a recorded run (schema ``ddpdoctor.run/1``), and code that writes and reads them.

Needs Python 3.9 or newer and only the standard library, because the hook in the job's interpreter uses it, too. Every file can be
read while it is being written and after a ``kill -9``: JSON documents are replaced as a whole, JSON-lines files only grow. The step
log of a long job, when it is thinned, is also replaced as a whole.

::

    RUN/manifest.json                       the first launcher's record: command, versions, environment, options
    RUN/hosts/<host>/launch-<pid>.json      the same, for each launcher
    RUN/hosts/<host>/telemetry.jsonl        NVML and host samples
    RUN/ranks/<rank:05d>/                   one recording of one rank; further recordings are <rank:05d>.1, .2 ...
        rank.json                           identity and settings of this rank
        steps.jsonl                         one line per step
        samples.jsonl                       samples of the training thread's source line
        workers.jsonl                       times of its data loader workers, and samples of their source lines
        memory.jsonl                        samples of the memory of its tensors on its device
        trace.json.gz                       the profiler window
        trace.1.json.gz, ...                windows requested while the job ran
        flight.json                         torch's flight recorder at the window's end
        progress.json, standing.json, hang_flight.json, faults.txt, ending.json, calls.jsonl
                                            status files of a rank that stopped, see ``stops``
    RUN/hosts/<host>/stall.json, ends.json                                              the launcher's records of stops
    RUN/diagnosis.json, RUN/report.html     written by the analysis

``docs/formats.md`` describes the fields.

::

    formats     layout (names, run ids), stepevents (also phases), notes, typed (types of fields)
    writing     spool (also of data loader workers), segments, heartbeat, calls_page, sources
    copying     draining, handover (documents, traces), compaction
    of a host   host_files (documents, locks, ranks before init_process_group), requests (living ranks, and requests to them)
    ends        liveness, ends (how a job and its ranks ended)
    reading     reader, attempts, stops (status files), packages (library paths, texts of faulthandler)
    files       files, owned
    masking     privacy (text, tokens), secretnames
"""

from .files import (
    bounded_lines,
    is_hollow,
    is_regular,
    listed,
    open_regular,
    parsed,
    ranks_in_words,
    read_bounded,
    read_json,
    reading,
    reason_of,
    runs_of,
    tensors_in_words,
    write_json,
)
from .layout import (
    CAPTURE_ANSWER,
    CAPTURE_ORDER,
    DIAGNOSIS_FILE,
    ENDING_FILE,
    FAULTS_FILE,
    FLIGHT_FILE,
    HANG_FLIGHT_FILE,
    MANIFEST_FILE,
    MAX_PROGRAMS,
    MEMORY_FILE,
    MEMORY_SCHEMA,
    MIN_PROGRAM_CORES,
    MOST_CAPTURES,
    PROGRESS_FILE,
    RANK_FILE,
    RANK_SCHEMA,
    REPORT_FILE,
    RUN_SCHEMA,
    SAMPLES_FILE,
    STACKS_FILE,
    STACKS_QUESTION,
    STALL_FILE,
    STANDING_FILE,
    STEPS_FILE,
    STEPS_SCHEMA,
    TELEMETRY_FILE,
    TELEMETRY_SCHEMA,
    TRACE_FILE,
    WORKERS_FILE,
    FilesBelow,
    closed_folders,
    files_below,
    id_of_root,
    is_recorded_file,
    is_run_directory,
    new_run_id,
    run_directories,
)
from .notes import Note, NoteCode, recorded_notes
from .owned import encoded, file_identity
from .typed import fitting
