"""Generated traces of GPU jobs, from a small simulator of the exam's own: hosts that issue, devices that run, links."""
