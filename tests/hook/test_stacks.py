"""Looking at another thread's stack."""

from __future__ import annotations

import subprocess
import sys
import threading

from ddpdoctor.hook import stacks

DYING_FRAMES = """
import sys, threading, time
from ddpdoctor.hook.stacks import stack_of

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
    names = [code.co_name for code, _ in stacks.stack_of(thread.ident or 0)]
    lines = {code.co_name: line for code, line in stacks.stack_of(thread.ident or 0)}
    go.set()
    thread.join()
    assert names[-5:] == ["inner", "outer", "run", "_bootstrap_inner", "_bootstrap"]
    assert lines["outer"] == outer.__code__.co_firstlineno + 1


def test_a_thread_that_is_gone() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert stacks.stack_of(thread.ident or 0) == []


def test_a_deep_recursion_is_cut() -> None:
    depths = []

    def down(levels: int) -> None:
        if levels:
            down(levels - 1)
        else:
            depths.append(len(stacks.stack_of(threading.get_ident())))

    down(stacks.MOST_FRAMES + 50)
    assert depths == [stacks.MOST_FRAMES]


def test_frames_that_are_just_ending() -> None:
    done = subprocess.run([sys.executable, "-c", DYING_FRAMES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
