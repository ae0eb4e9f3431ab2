"""All that runs inside a rank: standard library and the job's own torch only, Python 3.9 or newer.

Only the folder ``site`` is put on the job's path. Its ``sitecustomize`` waits for ``import torch``, by ``finder``, and then has
``install`` patch it; nothing is recorded until the process has turned out to be a rank (``lifetime``). In the job these modules
are called ``_ddpdoctor.hook.*``, so that a ddpdoctor that happens to be installed there is neither needed nor touched.

The packages and modules, each of which imports only from those below it::

    trial        settings of the job that a trial changes, only imported in a trial
    patches      what of torch is wrapped
    lifetime     where a recording begins and ends, and what goes with it; settings: rank.json
    stalls       status of a rank that hangs or has ended; fatalsignals: whether the hook or the job enabled faulthandler
    profiling    the profiler window, and samples of source lines
    recording    from events to lines of the step log
    job          what the job is made of, by number
    patching     wraps functions, and passes the job's own exceptions on; guard: counts errors of the hook; finder: calls a
                 function once a module has been imported; environment: the launcher's settings

A wrapper in ``patches`` appends an event to the :class:`recording.recorder.Recorder`, ``patches.optimizers`` finds the
end of the step, the recorder writes one line to the spool, whose words are those of :mod:`ddpdoctor.rundir.stepevents`,
and the launcher's storage process, or ``recording.writer``, copies it to the run directory.
"""
