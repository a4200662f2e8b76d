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
guide_step = partial(step, "Add a command")


def file_of(name: str) -> Path:
    return ROOT / f"quantkit/cli/{name.replace('-', '_')}.py"


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command, or those of a group, by their whole names."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for child_name in command.list_commands(context):
        if (child := command.get_command(context, child_name)) is not None:
            yield from leaves(f"{name} {child_name}", child)


ROOT_GROUP = click.Context(cli.cli)
COMMANDS_BY_NAME = {name: cli.cli.get_command(ROOT_GROUP, name) for name in COMMANDS if file_of(name).exists()}
ALL = dict(leaf for name, command in COMMANDS_BY_NAME.items() if command is not None for leaf in leaves(name, command))
by_command = pytest.mark.parametrize("name", ALL)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_function_of_its_name(name: str) -> None:
    verb = name.replace("-", "_")
    assert (verb in quantkit.__all__) != (name in WITHOUT_VERB), f"{guide_step(2)}; {guide_step(1)}"


def test_names_of_the_package_have_modules() -> None:
    """The functions are there, and of type checkers' imports as of the others."""
    names = set(quantkit.__all__) - {"__version__"}
    assert names == quantkit._HOME.keys(), guide_step(2)
    missing = [name for name in names if find_spec(f"quantkit.{quantkit._HOME[name]}") is None]
    assert not missing, f"{missing}: {guide_step(1)}"
    assert all(hasattr(quantkit, name) for name in names), guide_step(1)
    source = (ROOT / "quantkit/__init__.py").read_text()
    block = source.split("if TYPE_CHECKING:\n")[1].split("\n__all__")[0]
    imported = {name for line in re.findall(r" import (.+)", block) for name in line.split(", ")}
    assert imported == names, guide_step(2)


def test_a_file_of_cli_is_a_command() -> None:
    files = {path.stem for path in (ROOT / "quantkit/cli").glob("[a-z]*.py")} - OF_GROUPS
    assert files == {name.replace("-", "_") for name in COMMANDS}, f"{guide_step(6)}; {guide_step(4, command='<name>')}"


@by_command
def test_help_lists_options_by_group(name: str) -> None:
    command = ALL[name]
    assert isinstance(command, GroupedCommand), guide_step(4, command=name)
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(isinstance(option, GroupedOption) for option in options), guide_step(4, command=name)


@by_command
def test_paths_may_be_urls(name: str) -> None:
    paths = [p.name for p in ALL[name].params if isinstance(p.type, click.Path) and not isinstance(p.type, Place)]
    assert not paths, f"{paths}: {guide_step(5, command=name)}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_shows_it(name: str) -> None:
    assert re.search(rf"^quantkit {name}\b", (ROOT / "README.md").read_text(), re.MULTILINE), guide_step(7)
