"""Options of every command: -xyz is one name, never -x -y -z."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from quantkit.arguments import declarations
from quantkit.cli import cli
from quantkit.evaluate import SaveLogits
from quantkit.options.convert import ConvertOptions
from quantkit.options.export import ExportOptions
from quantkit.options.imatrix import ImatrixOptions
from quantkit.options.quantize import QuantizeOptions
from quantkit.options.search import SearchOptions
from quantkit.options.sensitivity import SensitivityOptions
from quantkit.report import ReportOptions


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    ctx = click.Context(group)
    yield path
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield from commands(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]


@pytest.mark.parametrize("path", list(commands(cli)), ids=" ".join)
@pytest.mark.parametrize("name", ["-hxy", "-oq", "-fab", "-mx.gguf", "-xyz", "-xy=1"])
def test_clusters_of_short_options_are_not_split(path: tuple[str, ...], name: str) -> None:
    result = CliRunner().invoke(cli, [*path, name])
    assert result.exit_code == 2
    assert f"No such option '{name}'" in result.stderr


@pytest.mark.parametrize("path", list(commands(cli)), ids=" ".join)
def test_every_command_has_help(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*path, "-h"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


#: Options records by command; options of `convert` that only its run without TYPE knows are in the same record.
RECORDS = {
    "quantize": QuantizeOptions,
    "convert": ConvertOptions,
    "export": ExportOptions,
    "search": SearchOptions,
    "sensitivity": SensitivityOptions,
    "imatrix": ImatrixOptions,
    "report": ReportOptions,
    "perplexity": SaveLogits,
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_declared_option_is_on_the_command_line(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    parameters = {p.name: p for p in command.params if isinstance(p, click.Option)}
    for field, declaration in declarations(RECORDS[name]).items():
        assert field in parameters, f"{name}: no group of declared_options has {field}"
        assert parameters[field].help == declaration.help


def test_imatrix_compare_is_an_alias_of_diff() -> None:
    by_name = [CliRunner().invoke(cli, ["imatrix", name, "-h"]).stdout.splitlines()[2:] for name in ("diff", "compare")]
    assert by_name[0] == by_name[1]


@pytest.mark.parametrize("arguments", [["-p", "-xyz"], ["--tokens", "-xyz"], ["-p", "-xyz", "--", "-abc"]])
def test_a_value_may_look_like_options(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["perplexity", *arguments])
    assert "No such option" not in result.stderr
