"""All that runs inside a rank: standard library and the job's own torch only, Python 3.9 or newer.

Only the folder ``site`` is put on the job's path. Its ``sitecustomize`` waits for ``import torch``, by ``finder``, and then has
``install`` patch it; nothing is recorded until the process has turned out to be a rank (``lifetime``). In the job these modules
are called ``_ddpdoctor.hook.*``, so that a ddpdoctor that happens to be installed there is neither needed nor touched.

The rooms, each of which imports only what stands right of it::

    patches ─► lifetime, services, settings ─► profiling ─► recording ─► job ─► patching, guard, finder, environment
    what of    begins and ends a recording,    the window,  from events  what    how a function is wrapped; what keeps our
    torch is   what goes with it, rank.json    samples      to lines of  it is   errors from the job; imports waited for;
    wrapped                                                 a step log   made of what the launcher says

The way of a record: a wrapper in ``patches`` appends an event to the :class:`recording.recorder.Recorder`,
``patches.optimizers`` finds the end of the step, the recorder writes one line to the spool, whose words are those of
:mod:`ddpdoctor.rundir.stepevents`, and the launcher's keeper, or ``recording.writer``, carries it to the run directory.
"""
