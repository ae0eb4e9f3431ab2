"""All that runs inside a rank: standard library and the job's own torch only, Python 3.9 or newer.

Only the folder ``site`` is put on the job's path. Its ``sitecustomize`` waits for ``import torch`` and then
patches it; nothing is
recorded until the process has turned out to be a rank. In the job these modules are called
``_ddpdoctor.hook.*``, so that a
ddpdoctor that happens to be installed there is neither needed nor touched.

The way of a record: a patched function (``collectives``, ``dataloader``, ...) appends an event to the
:class:`recorder.Recorder`,
``optimizers`` finds the end of the step, the recorder writes one line to the spool, ``writer`` carries it to
the run directory.
"""
