"""The command line: ``ddpdoctor VERB``. One file per verb, each with its click command as ``command``.

::

    verbs        run, demo (recorded: what both do), analyze, compare, history, digest, export (tracking), bundle, doctor,
                 watch (watched, watch_view, watch_ranks, keys), stacks, capture (capturing; asked: questions to ranks),
                 trials and patched (``try``), rules, rule_authors (``rules facts`` and ``new``), completion (completing)
    all verbs    main, groups, finite, configured, diagnosed, outputs, progress, say, onethread, apart (work in a process of its own)
"""

from __future__ import annotations

import sys
from typing import NoReturn

try:
    from ddpdoctor.cli.main import main
except Exception as error:  # what reads a command line is missing or broken
    _error = error

    def main() -> NoReturn:
        """Run the job that follows ``--``, which needs no reading; for all else, fail as the import did."""
        verb, *words = [*sys.argv[1:], ""]
        if verb != "run" or "--" not in words[:-2]:
            raise _error
        from ddpdoctor.launch import run_alone

        run_alone(words[words.index("--") + 1 : -1], _error)
