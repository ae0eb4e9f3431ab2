"""What faulthandler wrote, read wherever it ends."""

from __future__ import annotations

from ddpdoctor.rundir.packages import fatal_signal, faulting_thread, first_thread, innermost_line

CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f01 (most recent call first):
  File "/job/train.py", line 3 in read
  File "/job/train.py", line 9 in main

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in wait
"""


def test_the_thread_with_the_fault_is_told_and_not_the_first_one():
    assert faulting_thread(CRASH) == [("/job/train.py", 3, "read"), ("/job/train.py", 9, "main")]
    assert first_thread(CRASH) == [("/usr/lib/python3.11/threading.py", 1, "wait")]
    assert (innermost_line(CRASH), innermost_line(CRASH, or_library=True)) == ("", "threading.py:1 (wait)")


def test_a_text_that_was_cut_anywhere_is_read_as_far_as_it_goes():
    whole = faulting_thread(CRASH)
    for end in range(len(CRASH)):
        stack = faulting_thread(CRASH[:end])
        assert len(stack) <= len(whole)
        assert fatal_signal(CRASH[:end]) in (None, fatal_signal(CRASH))


def test_lines_of_the_code_that_records_are_not_the_jobs():
    package = "/job/tools/ddpdoctor"
    frames = "".join(
        f'  File "{package}/{file}", line 7 in write\n' for file in ("rundir/spool.py", "hook/patching.py")
    )
    assert innermost_line(
        CRASH.partition("  File")[0] + frames + '  File "/job/train.py", line 9 in main\n'
    ) == ("train.py:9 (main)")
