"""Runs a job and records it: the run directory, the child process and its signals, the environment, telemetry, hang detection.

The launcher adds nothing to the job's streams, forwards each signal exactly once and ends with the job's exit status. If the recording
fails, the job runs without it.

::

    the run       session         one recorded run from start to end
                  options         options of ``ddpdoctor run``
                  directory       the run directory and its manifest
    the job       child           the process, its streams and signals
                  alone           runs the job unrecorded if the recording cannot be started
    processes     helper          forked helper processes, which the launcher never waits for
                  storage_process touches storage: copies records, samples the host
                  hang_monitor    watches for hangs, reports them, and ends the job with ``--on-hang kill``
    a hang        rankwatch       state of this host's ranks, from their memory and /proc
                  unjoined        state of ranks before init_process_group
                  hang_detection  decides whether the job hangs, and whether that is proven, so that it may be ended
    afterwards    leftovers       records that are still in memory, and ranks that outlived the command
    ``doctor``    checkup         what can be recorded on this machine
"""
