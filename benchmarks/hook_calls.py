"""What each call of the hook takes in a training step, timed inside real steps.

    python benchmarks/hook_calls.py [--ranks 1] [--target-ms 20] [--steps 1500]

A step that computes displaces the hook's code and data from the caches, so calls in a row, which take a tenth, tell nothing; and steps
with and without the hook, compared in ``hook_overhead.py``, scatter by more than it costs. So the clock is read at both ends of everything
of ours that a step passes: before and after the hooks of optimizers, and around the wrappers less what they wrap. Reading the clock
displaces and costs, too, and whatever Python does first after a long calculation is slow, with us or without: so it is timed around
nothing in the same places, before the hooks of optimizers and, in half of the steps whose times only are kept, around what the
wrappers wrap, without them; and taken off. Printed are, for steps of which only the times are
kept and for steps recorded in full, the calls in a step, and mean, median and upper decile of what each takes, us; then their sum. The
collective that is called from Python has a line of its own: most jobs call none in a step, DDP's are not seen there. The last line is a
long run's average step, with the CPU time of the threads beside the training thread, of an undisturbed stretch, added whole.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from hook_overhead import FULL, TIMES, Switch, launch, long_run_every, make_step, threads_ns

SETTLE_STEPS = 600
NOTHING = "reading the clock"
WITHOUT = ", without"
"""What a wrapper's name is followed by where it was passed by."""
COLLECTIVE = "all_reduce"
ORIGINAL, RECORDED = "original", "slow_path"
"""Variables of the hook's wrappers: what they wrap, and the wrapper for what is not usual."""


def main() -> None:
    """Run the job and print what its calls cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--target-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=1500, help="of either kind")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.target_ms, options.steps)
        return
    words = ["--worker", "--target-ms", str(options.target_ms), "--steps", str(options.steps)]
    launch(options.ranks, [__file__, *words])


def work(target_ms: float, steps: int) -> None:
    """The rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step = make_step(target_ms)
    switch = Switch()
    for _ in range(SETTLE_STEPS):
        step()
    times = Times()
    times.of_hooks()
    times.of_wrappers(switch.patches)
    sums_us, step_ms = [], 0.0
    for kind, words in ((TIMES, "only the times are kept"), (FULL, "recorded in full")):
        switch.to(kind)
        for _ in range(20):
            step()
        times.forget()
        measured = [True] * steps
        if kind == TIMES:
            measured += [False] * steps
            random.Random(0).shuffle(measured)
        begun = perf_counter_ns()
        for of_step in measured:
            times.pass_by = not of_step
            step()
        step_ms = (perf_counter_ns() - begun) / len(measured) / 1e6
        sums_us.append(times.sum_us(steps))
        if not dist.get_rank():
            times.print(f"{words}: steps of {step_ms:.1f} ms", steps)
            print(f"{'all but the collective, upper tenths left out':53} {'':6} {sums_us[-1]:7.1f}\n")
    every = long_run_every(switch.session.recorder.thinning.cost_us, step_ms * 1e6)
    switch.as_in_a_long_run(every)
    begun, before_ns = perf_counter_ns(), threads_ns()
    for _ in range(steps):
        step()
    beside_us = (threads_ns() - before_ns) / steps / 1e3
    step_ms = (perf_counter_ns() - begun) / steps / 1e6
    if not dist.get_rank():
        mean_us = sums_us[0] * (1 - 1 / every) + sums_us[1] / every + beside_us
        print(
            f"one step in {every} in full, {beside_us:.1f} us beside the training thread: {mean_us:.1f} us, "
            f"{mean_us / 10 / step_ms:.2f} % of {step_ms:.1f} ms",
            flush=True,
        )
    dist.barrier()
    os._exit(0)


class Times:
    """What was taken, ns, by the name of the call."""

    def __init__(self) -> None:
        self.taken: dict[str, list[int]] = defaultdict(list)
        self.pass_by = False
        """Set in steps in which wrappers are left out, to time nothing in their places."""

    def forget(self) -> None:
        """Begin anew; what nothing takes in a wrapper's place is known from steps of which only the times are kept."""
        for name in list(self.taken):
            if not name.endswith(WITHOUT):
                del self.taken[name]

    def of_hooks(self) -> None:
        """Bracket the hooks on optimizers by two of our own."""
        from torch.optim import optimizer as module

        for table, register, name in (
            (module._global_optimizer_pre_hooks, module.register_optimizer_step_pre_hook, "optimizer, start"),
            (module._global_optimizer_post_hooks, module.register_optimizer_step_post_hook, "optimizer, end"),
        ):
            hooks = list(table)
            begins, nothing, ends = self._brackets(name)
            register(begins)
            register(nothing)
            for hook in hooks:
                table.move_to_end(hook)
            register(ends)

    def _brackets(self, name: str) -> Iterator[Callable[..., None]]:
        at = [0]

        def begins(*_: Any) -> None:
            at[0] = perf_counter_ns()

        def nothing(*_: Any) -> None:
            self._add(NOTHING, perf_counter_ns() - at[0])
            at[0] = perf_counter_ns()

        def ends(*_: Any) -> None:
            self._add(name, perf_counter_ns() - at[0])

        return iter((begins, nothing, ends))

    def of_wrappers(self, patches: Any) -> None:
        """Bracket each wrapper, and what it wraps."""
        for redo in patches._redo:
            found = {
                name: cell.cell_contents
                for name, cell in zip(redo.__code__.co_freevars, redo.__closure__ or (), strict=True)
            }
            value = found.get("value")
            if not isinstance(value, types.FunctionType) or ORIGINAL not in value.__code__.co_freevars:
                continue
            inside = value.__closure__[value.__code__.co_freevars.index(ORIGINAL)]  # type: ignore[index]
            wrapped = inside.cell_contents
            if not isinstance(wrapped, types.FunctionType | types.BuiltinFunctionType):
                continue
            outer, inside.cell_contents = self._both(value, wrapped, getattr(wrapped, "__qualname__", ""))
            if RECORDED in value.__code__.co_freevars:
                # It has a short way, and calls another wrapper otherwise.
                other = value.__closure__[value.__code__.co_freevars.index(RECORDED)].cell_contents  # type: ignore[index]
                other.__closure__[
                    other.__code__.co_freevars.index(ORIGINAL)
                ].cell_contents = inside.cell_contents
            if "cell" in found:
                found["cell"].cell_contents = outer
            else:
                setattr(found["owner"], found["name"], outer)

    def _both(self, wrapper: Any, wrapped: Any, name: str) -> tuple[Any, Any]:
        begun, before, after = [0], [0], [0]

        def inner(*args: Any, **kwargs: Any) -> Any:
            before[0] = perf_counter_ns() - begun[0]
            try:
                return wrapped(*args, **kwargs)
            finally:
                after[0] = perf_counter_ns()

        def outer(*args: Any, **kwargs: Any) -> Any:
            passed = inner if self.pass_by else wrapper
            begun[0] = perf_counter_ns()
            try:
                return passed(*args, **kwargs)
            finally:
                if after[0] < begun[0]:
                    raise RuntimeError(f"the wrapper of {name} did not call what it wraps where it is timed")
                taken_ns = before[0] + perf_counter_ns() - after[0]
                if passed is inner:
                    self.taken[name + WITHOUT].append(taken_ns)
                else:
                    self._add(name, taken_ns)

        return outer, inner

    def _add(self, name: str, ns: int) -> None:
        if not self.pass_by:
            self.taken[name].append(ns)

    def print(self, title: str, steps: int) -> None:
        """A line for each kind of call."""
        print(f"{title}\n{'':53} {'calls':>6} {'mean':>7} {'median':>7} {'90 %':>7}")
        for name, taken in sorted(self.taken.items(), key=lambda pair: -sum(pair[1])):
            of_each = self._of_each_us(name)
            tenths = statistics.quantiles(of_each, n=10) if len(of_each) > 1 else of_each * 9
            print(
                f"{name:53} {len(taken) / steps:6.2f} {statistics.fmean(of_each):7.1f} {statistics.median(of_each):7.1f} "
                f"{tenths[-1]:7.1f}"
            )

    def sum_us(self, steps: int) -> float:
        """Of all calls but the collective's in a step. Of each the upper tenth, which is what the machine did besides, is left out."""
        whole = 0.0
        for name, taken in self.taken.items():
            if name not in (NOTHING, COLLECTIVE) and not name.endswith(WITHOUT):
                usual = sorted(self._of_each_us(name))[: max(1, len(taken) * 9 // 10)]
                whole += len(taken) / steps * statistics.fmean(usual)
        return whole

    def _of_each_us(self, name: str) -> list[float]:
        nothing = self.taken.get(name + WITHOUT, self.taken[NOTHING])
        clock = 0.0 if name == NOTHING or name.endswith(WITHOUT) else statistics.median(nothing)
        return [max(0.0, each - clock) / 1e3 for each in self.taken[name]]


if __name__ == "__main__":
    main()
