"""A command group that suggests names for a mistyped command."""

from __future__ import annotations

import click

from ddpdoctor.nearest import did_you_mean


class Group(click.Group):
    """click.Group with suggestions, which click has only in newer versions, and not for lazily imported commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that ``args`` begin with. Raises click.UsageError, with a suggestion, if there is none."""
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)
