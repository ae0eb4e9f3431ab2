"""Printing of sentences by all commands."""

from __future__ import annotations

import click

from ddpdoctor.plain import plain


def say(sentence: str, *, err: bool = False) -> None:
    """Print ``sentence`` as one line on stdout or stderr, without control characters. Raises OSError if the stream is closed."""
    click.echo(plain(sentence), err=err)
