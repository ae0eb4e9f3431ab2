"""Generated traces of GPU jobs, from the exam's own small simulator of hosts, devices and links."""
