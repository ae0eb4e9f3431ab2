"""The command line: ``ddpdoctor VERB``. One file per verb, each with its click command as ``command``."""

from ddpdoctor.cli.main import main

__all__ = ["main"]
