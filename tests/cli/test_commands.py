"""Every command has what CONTRIBUTING.md, "Add a command", asks for."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import click
import pytest

import quantkit
from examples import PAGES, blocks_of, command_lines
from guide import step
from quantkit import cli
from quantkit.cli import COMMANDS
from quantkit.cli._options import GroupedCommand, GroupedOption
from quantkit.cli._paths import Place

ROOT = Path(__file__).parents[2]
#: Files of cli/ that are commands of a group.
OF_GROUPS = {"imatrix_collect", "imatrix_diff", "imatrix_show"}
#: Public functions that raise nothing.
WITHOUT_ERRORS = {"quantkit.recipes.detect_dialect"}
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
#: Commands in the examples of README.md, the tutorial and the how-to pages.
EXAMPLES = {
    arguments[0]
    for page in PAGES
    for block in blocks_of(page)
    if block.language == "sh"
    for arguments in command_lines(block)
}
by_command = pytest.mark.parametrize("name", ALL)


def function_of(name: str) -> str:
    """Return the name of a command's function: of `recipe lint`, lint_recipe."""
    if name == "try":  # a keyword of Python
        return "generate"
    return "_".join(reversed(name.split())).replace("-", "_")


@by_command
def test_a_command_is_a_function_of_its_name(name: str) -> None:
    verb = function_of(name)
    assert verb in quantkit.__all__, f"quantkit.{verb}: {guide_step(2)}; {guide_step(1)}"
    assert inspect.isfunction(getattr(quantkit, verb)), guide_step(1)


def test_a_group_with_options_is_also_a_function() -> None:
    """`quantkit imatrix -m ..` collects."""
    groups = {name for name, command in COMMANDS_BY_NAME.items() if isinstance(command, click.Group) and command.params}
    assert groups == {"imatrix"}
    assert inspect.isfunction(quantkit.imatrix)


def test_names_of_the_package_have_modules() -> None:
    """The names are there, and of type checkers' imports as of the others."""
    names = set(quantkit.__all__) - {"__version__"}
    assert names == quantkit._HOME.keys(), guide_step(2)
    assert len(quantkit.__all__) == len(set(quantkit.__all__))
    missing = [name for name in names if find_spec(f"quantkit.{quantkit._HOME[name] or name}") is None]
    assert not missing, f"{missing}: {guide_step(1)}"
    assert all(hasattr(quantkit, name) for name in names), guide_step(1)
    source = (ROOT / "quantkit/__init__.py").read_text()
    block = source.split("if TYPE_CHECKING:\n")[1].split("\n__all__")[0]
    imported = {name for line in re.findall(r" import (.+)", block) for name in line.split(", ")}
    assert imported == names, guide_step(2)


def test_dir_is_the_public_interface() -> None:
    assert dir(quantkit) == sorted(quantkit.__all__)
    code = "import quantkit; print(*dir(quantkit))"  # before anything else is imported
    listing = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert listing.split() == sorted(quantkit.__all__)


PUBLIC_MODULES = [name for name, home in quantkit._HOME.items() if not home]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_a_public_module_lists_its_names(name: str) -> None:
    module = getattr(quantkit, name)
    assert isinstance(module, ModuleType)
    assert all(hasattr(module, member) for member in module.__all__)


PUBLIC = {f"quantkit.{name}": getattr(quantkit, name) for name in quantkit.__all__ if quantkit._HOME.get(name)} | {
    f"quantkit.{name}.{member}": getattr(getattr(quantkit, name), member)
    for name in PUBLIC_MODULES
    for member in getattr(quantkit, name).__all__
}
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if callable(value)])
def test_a_public_name_has_a_docstring(name: str) -> None:
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    assert re.match(r"[A-Z][^\n]+[.:]", docstring), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_documents_its_exceptions(name: str) -> None:
    """Or it does no more than look up a table."""
    if name not in WITHOUT_ERRORS:
        assert re.search(r"[Rr]aises|[Ee]rrors? as", inspect.getdoc(PUBLIC[name]) or ""), name


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
def test_a_page_documents_it(name: str) -> None:
    assert name in EXAMPLES, guide_step(7)
