"""Samples GPUs, host and the ranks' processes during a run, once per host; reads a running job's records for ``watch`` and Prometheus."""
