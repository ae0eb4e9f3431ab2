"""A rank without an accelerator: all work runs on the thread that asks for it."""

from __future__ import annotations

from .machine import MAIN_THREAD, Machine


class Processor(Machine):
    """Like :class:`Machine`, but launched work is done at once by the host, and waiting blocks it."""

    backward_thread = MAIN_THREAD
    operator_part = "compute"

    def runtime(self, name: str, duration_us: float, external: int) -> int:
        """There is no CUDA runtime: takes no time and leaves no event."""
        return 0

    def enqueue(
        self,
        category: str,
        name: str,
        call: str,
        call_us: float,
        duration_us: float,
        external: int,
        part: str = "compute",
        args: str = "",
    ) -> float:
        """Does the work on the calling thread; returns its end."""
        with self.part(part):
            self.now_us += call_us + duration_us
        self.compute_free_us = self.now_us
        return self.now_us

    def wait_until(self, name: str, until_us: float, external: int) -> None:
        """The thread blocks."""
        self.now_us = max(self.now_us, until_us)

    def await_collective(self, last_arrival_us: float, end_us: float) -> None:
        """``Work.wait`` on a CPU: the thread blocks, first for the last rank, then for the transfer."""
        start_us = self.now_us
        self.now_us = max(start_us, end_us)
        self.mark("comm_wait", start_us, min(last_arrival_us, self.now_us))
        self.mark("comm_transfer", max(start_us, last_arrival_us), self.now_us)

    def item(self) -> None:
        """``tensor.item()``: a read of memory."""
        with self.span("cpu_op", "aten::item"), self.span("cpu_op", "aten::_local_scalar_dense"):
            self.work(3.0)

    def synchronize(self) -> None:
        """There is nothing to wait for."""
