"""The command line: ``ddpdoctor VERB``. One file per verb, each with its click command as ``command``.

::

    verbs        run, demo (run_and_present: what both do), analyze, compare, history, digest, export (tracker_options), bundle, doctor,
                 watch (watch_loop, watch_view, watch_ranks, watch_metrics, keys), stacks, capture (capture_request; rank_answers),
                 trials and patch (``try``), rules, rule_authors (``rules facts`` and ``new``), completion (shell_completion)
    all verbs    main, groups, finite, project_config, diagnosis_of, outputs, progress, say, numpy_threads, child (work in a child process)
"""

from __future__ import annotations

import sys
from typing import NoReturn

try:
    from ddpdoctor.cli.main import main
except Exception as error:  # a package that the command line needs is missing or broken
    _error = error

    def main() -> NoReturn:
        """For ``run``, start the job after ``--`` without recording it. For all other verbs, raise the import's exception."""
        verb, *words = [*sys.argv[1:], ""]
        if verb != "run" or "--" not in words[:-2]:
            raise _error
        from ddpdoctor.launch import run_alone

        run_alone(words[words.index("--") + 1 : -1], _error)
