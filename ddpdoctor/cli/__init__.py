"""The command line: ``ddpdoctor VERB``. Each verb has its own module, with its click command as ``command``.

::

    verbs        run and demo (both use run_and_present), analyze, compare, history, digest, export, bundle, doctor, rules,
                 watch (watch_loop, watch_view), capture and stacks (rank_requests), trials (``try``), completion
    all verbs    main, options (of several verbs), session (printing, progress, configuration), child (work in a child process)
"""

from __future__ import annotations

import sys
from typing import NoReturn

try:
    from ddpdoctor.cli.main import main
except Exception as error:  # a package that the command line needs is missing or broken
    _error = error

    def main() -> NoReturn:
        """For ``run``, start the job after ``--`` unrecorded. For all other verbs, raise the exception of the import."""
        verb, *words = [*sys.argv[1:], ""]
        if verb != "run" or "--" not in words[:-2]:
            raise _error
        from ddpdoctor.launch.alone import run_alone

        run_alone(words[words.index("--") + 1 : -1], _error)
