"""All that runs inside a rank: standard library and the job's own torch only, Python 3.9 or newer.

Only the folder ``site`` is put on the job's path. Its ``sitecustomize`` waits for ``import torch``, by ``finder``, and then has
``install`` patch it; nothing is recorded until the process has turned out to be a rank (``lifetime``). In the job these modules
are called ``_ddpdoctor.hook.*``, so that a ddpdoctor that happens to be installed there is neither needed nor touched.

The rooms and the modules beside them, each of which imports only what stands below it::

    patches      what of torch is wrapped
    lifetime     where a recording begins and ends; services: what goes with it; settings: rank.json
    stalls       where a rank stands while it hangs, and how it ended; fatalsignals: whose handler of those it is
    profiling    the profiler window, and samples of source lines
    recording    from events to lines of the step log
    job          what the job is made of, by number
    patching     how a function is wrapped, and what keeps the job's errors from us; guard: what keeps ours from the job; finder: a
                 module's import is waited for;
                 environment: what the launcher asks for

The way of a record: a wrapper in ``patches`` appends an event to the :class:`recording.recorder.Recorder`,
``patches.optimizers`` finds the end of the step, the recorder writes one line to the spool, whose words are those of
:mod:`ddpdoctor.rundir.stepevents`, and the launcher's keeper, or ``recording.writer``, carries it to the run directory.
"""
