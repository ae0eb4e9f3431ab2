"""``ddpdoctor completion``: the script with which a shell completes ddpdoctor's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_DDPDOCTOR_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script for SHELL: bash, zsh or fish.

    \b
    Examples:
      ddpdoctor completion bash >> ~/.bashrc
      ddpdoctor completion zsh >> ~/.zshrc
      ddpdoctor completion fish > ~/.config/fish/completions/ddpdoctor.fish
    """
    from ddpdoctor.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, "every shell of SHELLS is known to click"
    click.echo(kind(cli, {}, "ddpdoctor", COMPLETE_VARIABLE).source())
