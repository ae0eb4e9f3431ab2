"""A group of commands that says which one a mistyped name may have meant."""

from __future__ import annotations

import click

from ddpdoctor.nearest import did_you_mean


class Group(click.Group):
    """As click's own, which in its older versions does not, and in none where commands are imported when they are asked for."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that ``args`` begin with. Raises click.UsageError where there is none."""
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)
