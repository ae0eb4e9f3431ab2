"""The one place from which commands put sentences on a terminal."""

from __future__ import annotations

import click

from ddpdoctor.plain import plain


def say(sentence: str, *, err: bool = False) -> None:
    """Print ``sentence`` as one line on stdout, or on stderr: names and notes in it may come from anybody's files.

    Raises OSError where nobody can read it.
    """
    click.echo(plain(sentence), err=err)
