"""What the kernel calls this start of the machine."""

from __future__ import annotations


def boot_id() -> str | None:
    """Two machines may have one name, but each has a clock of its own, and a start of its own; None where nobody tells."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as source:
            return source.read(64).strip()
    except OSError:
        return None
