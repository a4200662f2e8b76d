"""One command line: rules that the options and the help of all commands hold."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from commands import leaves
from quantkit.cli import COMMANDS, cli
from quantkit.cli._help import WIDTH
from quantkit.cli._json import JsonOption
from quantkit.cli._options import HEADINGS, SPELLINGS, Names, is_compatible_only

#: Lines of the first screen of a long command.
SCREEN = 30


ALL = dict(leaves((), cli))
by_path = pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "quantkit")


def _help(path: tuple[str, ...], option: str = "--help") -> str:
    result = CliRunner().invoke(cli, [*path, option], env={"COLUMNS": "200"}, prog_name="quantkit")
    assert result.exit_code == 0, result.output
    return result.stdout


def _options(path: tuple[str, ...]) -> list[click.Option]:
    return [p for p in ALL[path].params if isinstance(p, click.Option) and not is_compatible_only(p)]


def _names(path: tuple[str, ...]) -> dict[str, click.Option]:
    return {name: option for option in _options(path) for name in (*option.opts, *option.secondary_opts)}


@by_path
@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_has_80_columns(path: tuple[str, ...], option: str) -> None:
    if option == "--help-all" and isinstance(ALL[path], click.Group) and path != ("imatrix",):
        return  # a group without options
    lines = _help(path, option).splitlines()
    assert not [line for line in lines if len(line) > WIDTH]
    assert not [line for line in lines if line.strip().startswith((",", ")"))]
    assert not [line for line in lines if line.endswith("-") and not line.endswith((" -", "--"))]


@by_path
def test_headings_have_one_order(path: tuple[str, ...]) -> None:
    groups = list(dict.fromkeys(o.group for o in _options(path) if not o.hidden and hasattr(o, "group")))
    assert {group.partition(" (")[0] for group in groups} <= set(HEADINGS)
    if not path or not groups:
        return
    text = _help(path, "--help-all")
    headings = [line[:-1].partition(" (")[0] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    ranks = [HEADINGS.index(heading) for heading in headings if heading in HEADINGS]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("name", ["quantize", "convert"])
def test_the_first_screen(name: str) -> None:
    short, long = _help((name,)), _help((name,), "--help-all")
    assert len(short.splitlines()) <= SCREEN + 6 * (name == "convert")
    assert len(long.splitlines()) > 2 * SCREEN
    assert "--help-all" in short
    for option in ("--imatrix", "--tensor-type", "--resume", "--overwrite", "--dry-run", "--threads"):
        assert option in short
    assert "--balance" not in short
    assert "--balance" in long or name == "convert"


#: Names that belong together: a command that has one has all.
SYNONYMS = (
    {"-j", "-t", "--threads"},
    {"-c", "--ctx-size"},
    {"-f", "--file"},
    {"-ngl", "--gpu-layers"},
    {"-ot", "--override-tensor"},
)


@by_path
@pytest.mark.parametrize("synonyms", SYNONYMS, ids=lambda names: max(names, key=len))
def test_synonyms_belong_to_one_option(path: tuple[str, ...], synonyms: set[str]) -> None:
    names = _names(path)
    options = [names.get(name) for name in synonyms]
    assert len(set(map(id, options))) == 1, {name: name in names for name in synonyms}


@by_path
def test_json_has_one_meaning(path: tuple[str, ...]) -> None:
    """Every command writes its result as JSON: groups do not, except the one that is a command itself."""
    if isinstance(ALL[path], click.Group) and path != ("imatrix",):
        return
    option = _names(path)["--json"]
    assert isinstance(option, JsonOption)
    assert option.flag_value == "-"
    assert "--overwrite" in _names(path)


@by_path
def test_chunks_and_outputs(path: tuple[str, ...]) -> None:
    names = _names(path)
    if (chunks := names.get("--chunks")) is not None:
        assert chunks.metavar == "N" or chunks.type.name in ("n", "integer range")
    if "--output" in names:
        assert "-o" in names
        assert names["-o"] is names["--output"]


@by_path
def test_projects_have_one_vocabulary(path: tuple[str, ...]) -> None:
    for option in _options(path):
        if not isinstance(option.type, click.Choice):
            continue
        choices = {str(choice) for choice in option.type.choices}
        assert choices.isdisjoint({"mainline", "ik_llama.cpp", "ours"}), option.opts
        if isinstance(option.type, Names) and {"llama.cpp", "ik"} <= choices:
            for spelling, name in SPELLINGS.items():
                if name in choices:
                    assert option.type.convert(spelling, option, None) == option.type.convert(name, option, None)


@by_path
def test_every_option_has_help(path: tuple[str, ...]) -> None:
    for option in _options(path):
        if not option.hidden:
            assert option.help, option.opts
            assert option.help[0].isupper() or option.help[0] in "-[1<", option.help
            assert option.help.rstrip("]").endswith((".", ")", "]")) or "[default" in option.help, option.help


def test_commands_have_one_line() -> None:
    assert all(text.endswith(".") and len(text) < 110 for text in COMMANDS.values())
