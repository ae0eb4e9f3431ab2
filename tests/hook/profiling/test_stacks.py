"""Looking at another thread's stack."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from ddpdoctor.hook.profiling import sampler

DYING_FRAMES = """
import sys, threading, time
from ddpdoctor.hook.profiling.sampler import stack_of

class SlowEnd:
    def __del__(self):
        time.sleep(0.00002)   # lets the other thread run while the frame is taken apart

def work(depth):
    things = [SlowEnd() for _ in range(depth % 4)]
    if depth:
        work(depth - 1)

def look():
    while True:
        time.sleep(0.00005)
        seen.append(len(stack_of(main)))

seen, main = [], threading.main_thread().ident
sys.setswitchinterval(1e-5)
threading.Thread(target=look, daemon=True).start()
until = time.monotonic() + 3
while time.monotonic() < until:
    work(12)
print(len(seen) > 100 and max(seen) > 5)
"""

COLLECTED_MEANWHILE = """
import gc, random, sys, threading, time
from ddpdoctor.hook.profiling.sampler import stack_of

class SlowEnd:
    def __del__(self):
        time.sleep(0)

def collecting(phase, info):
    if threading.get_ident() != main:
        time.sleep(0.0001)   # lets the other thread run where the collector starts in the reader's

def function(number):
    # Frames of different sizes, so that the memory of one is not the next one's by chance.
    lines = [f"    v{i} = depth + {i}" for i in range(number * 3)]
    source = "def work(depth):\\n" + "\\n".join(lines) + "\\n    end = SlowEnd()\\n"
    space = {"SlowEnd": SlowEnd, "random": random, "all_of_them": functions}
    exec(source + "    if depth:\\n        random.choice(all_of_them)(depth - 1)\\n", space)
    return space["work"]

def look():
    while True:
        seen.append(len(stack_of(main)))

functions, seen, main = [], [], threading.main_thread().ident
functions.extend(map(function, range(20)))
sys.setswitchinterval(1e-5)
gc.set_threshold(5, 1000000, 1000000)
gc.callbacks.append(collecting)
threading.Thread(target=look, daemon=True).start()
until = time.monotonic() + 4
while time.monotonic() < until:
    functions[0](random.randrange(40))
print(len(seen) > 100 and max(seen) > 5 and gc.isenabled())
"""


def test_the_stack_of_another_thread() -> None:
    there, go = threading.Event(), threading.Event()

    def inner() -> None:
        there.set()
        go.wait()

    def outer() -> None:
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    there.wait()
    names = [code.co_name for code, _ in sampler.stack_of(thread.ident or 0)]
    lines = {code.co_name: line for code, line in sampler.stack_of(thread.ident or 0)}
    go.set()
    thread.join()
    assert names[-5:] == ["inner", "outer", "run", "_bootstrap_inner", "_bootstrap"]
    assert lines["outer"] == outer.__code__.co_firstlineno + 1


def test_a_thread_that_is_gone() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert sampler.stack_of(thread.ident or 0) == []


def test_a_deep_recursion_is_cut() -> None:
    depths = []

    def down(levels: int) -> None:
        if levels:
            down(levels - 1)
        else:
            depths.append(len(sampler.stack_of(threading.get_ident())))

    down(sampler.MOST_FRAMES + 50)
    assert depths == [sampler.MOST_FRAMES]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        assert sampler.stack_of(threading.get_ident())
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_an_error_leaves_the_collector_on(monkeypatch) -> None:
    def failing() -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(sys, "_current_frames", failing)
    with pytest.raises(MemoryError):
        sampler.stack_of(threading.get_ident())
    assert gc.isenabled()


@pytest.mark.parametrize("program", [DYING_FRAMES, COLLECTED_MEANWHILE])
@pytest.mark.extended
def test_threads_that_go_on_meanwhile(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
