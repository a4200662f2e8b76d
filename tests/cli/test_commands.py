"""Every command has what CONTRIBUTING.md, "Add a command", asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import quantkit
from guide import step
from quantkit import cli
from quantkit.cli import COMMANDS
from quantkit.cli._options import GroupedCommand, GroupedOption
from quantkit.cli._paths import Place

ROOT = Path(__file__).parents[2]
#: Commands without a function of their name, and what stands for it.
WITHOUT_VERB = {
    "cache": "show_cache, prune_cache and verify_cache: it is a group",
    "recipe": "write_recipe: it is a group, whose other commands print",
    "types": "quantkit.types.TYPES is the table",
}
#: Files of cli/ that are commands of a group.
OF_GROUPS = {"imatrix_collect", "imatrix_diff", "imatrix_show"}
how = partial(step, "Add a command")


def file_of(name: str) -> Path:
    return ROOT / f"quantkit/cli/{name.replace('-', '_')}.py"


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command, or those of a group, by their whole names."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for own in command.list_commands(context):
        if (child := command.get_command(context, own)) is not None:
            yield from leaves(f"{name} {own}", child)


ROOT_GROUP = click.Context(cli.cli)
THERE = {name: cli.cli.get_command(ROOT_GROUP, name) for name in COMMANDS if file_of(name).exists()}
ALL = dict(leaf for name, command in THERE.items() if command is not None for leaf in leaves(name, command))
each = pytest.mark.parametrize("name", ALL)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_function_of_its_name(name: str) -> None:
    verb = name.replace("-", "_")
    assert (verb in quantkit.__all__) != (name in WITHOUT_VERB), f"{how(2)}; {how(1)}"


def test_names_of_the_package_have_modules() -> None:
    """The functions are there, and of type checkers' imports as of the others."""
    names = set(quantkit.__all__) - {"__version__"}
    assert names == quantkit._HOME.keys(), how(2)
    missing = [name for name in names if find_spec(f"quantkit.{quantkit._HOME[name]}") is None]
    assert not missing, f"{missing}: {how(1)}"
    assert all(hasattr(quantkit, name) for name in names), how(1)
    source = (ROOT / "quantkit/__init__.py").read_text()
    block = source.split("if TYPE_CHECKING:\n")[1].split("\n__all__")[0]
    imported = {name for line in re.findall(r" import (.+)", block) for name in line.split(", ")}
    assert imported == names, how(2)


def test_a_file_of_cli_is_a_command() -> None:
    files = {path.stem for path in (ROOT / "quantkit/cli").glob("[a-z]*.py")} - OF_GROUPS
    assert files == {name.replace("-", "_") for name in COMMANDS}, f"{how(6)}; {how(4, command='<name>')}"


@each
def test_help_lists_options_by_group(name: str) -> None:
    command = ALL[name]
    assert isinstance(command, GroupedCommand), how(4, command=name)
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(isinstance(option, GroupedOption) for option in options), how(4, command=name)


@each
def test_paths_may_be_urls(name: str) -> None:
    bare = [p.name for p in ALL[name].params if isinstance(p.type, click.Path) and not isinstance(p.type, Place)]
    assert not bare, f"{bare}: {how(5, command=name)}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_shows_it(name: str) -> None:
    assert re.search(rf"^quantkit {name}\b", (ROOT / "README.md").read_text(), re.MULTILINE), how(7)
