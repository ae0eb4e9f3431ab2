"""The code that runs inside a rank. It needs Python 3.9 or newer and imports only the standard library and the job's torch.

Only the folder ``site`` is put on the job's path. Its ``sitecustomize`` uses ``finder`` to wait for ``import torch``, then calls
``install``, which patches torch. Nothing is recorded until the process joins a process group (``lifetime``). Inside the job the
modules are named ``_ddpdoctor.hook.*``, so they do not clash with a ddpdoctor installed there.

The packages and modules; each imports only from those below it::

    trial        changes settings of the job; imported only in a trial
    patches      the wrappers of torch functions
    lifetime     starts and ends a recording and its helpers; rank_document: rank.json
    stalls       status of a rank that hangs or has ended; fatalsignals: whether the hook or the job enabled faulthandler
    profiling    the profiler window, and samples of source lines
    recording    turns events into lines of the step log
    job          numbers and descriptions of the job's models, loaders, optimizers and source lines
    patching     wraps functions, re-raises the job's exceptions; guard: counts errors of the hook; finder: calls a
                 function after a module is imported; environment: the launcher's settings

A wrapper in ``patches`` appends an event to the :class:`recording.recorder.Recorder`. ``patches.optimizers`` detects the end of
the step. The recorder then writes one line to the spool in the format of :mod:`ddpdoctor.rundir.stepevents`. The launcher's
storage process, or ``recording.writer``, copies it to the run directory.
"""
