"""All commands, those of groups too."""

from __future__ import annotations

from collections.abc import Iterator

import click


def leaves(path: tuple[str, ...], command: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and, of a group, all commands below it, with the names that lead to each."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (child := command.get_command(context, name)) is not None:
                yield from leaves((*path, name), child)
