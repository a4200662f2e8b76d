"""Optional packages: all that are missing are named before any work, with one line of pip."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit import extras
from quantkit.cli import cli
from quantkit.cook import config_from, plan_cook
from quantkit.extras import CHAT, MODEL_CARD, PLOT, REPORT, SEARCH, Extra, MissingPackages, check_extras

EXTRAS = [value for value in vars(extras).values() if isinstance(value, Extra)]
DECLARED = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: Extra) -> None:
    for extra in hidden:
        for module in extra.packages:
            monkeypatch.setitem(sys.modules, module, None)


def asked_for(error: MissingPackages) -> set[str]:
    """Return the extras in an error's line of pip."""
    names = re.search(r"pip install 'gguf-quantkit\[([\w,]+)\]'", error.message)
    assert names is not None
    return set(names[1].split(","))


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: f"{extra.name}-{extra.purpose}")
def test_pyproject_has_the_packages_of_extras(extra: Extra) -> None:
    packages = {re.split(r"[><=]", requirement)[0] for requirement in DECLARED["optional-dependencies"][extra.name]}
    assert set(extra.packages.values()) <= packages
    (everything,) = DECLARED["optional-dependencies"]["all"]
    assert (extra.name in re.findall(r"\w+", everything)) == (extra in extras.ALL)
    assert (extra in extras.ALL) != (extra in extras.ON_REQUEST)


def test_all_missing_packages_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, SEARCH, REPORT)
    with pytest.raises(MissingPackages) as caught:
        check_extras(SEARCH, REPORT, PLOT)
    assert caught.value.extras == (SEARCH, REPORT)
    assert asked_for(caught.value) == {"search", "report"}


def test_a_cook_names_all_missing_packages_of_its_steps(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text\n" * 99)
    settings = {"targets": ["3.5bpw"], "output": str(tmp_path / "out"), "calibration": {"text": [str(text)]}}
    hide(monkeypatch, SEARCH, REPORT)
    with pytest.raises(MissingPackages) as caught:
        plan_cook(config_from({"model": str(data / "tiny-moe-bf16.gguf"), **settings}, "test", tmp_path))
    assert asked_for(caught.value) == {"search", "report"}
    assert not (tmp_path / "out").exists()


def test_a_cook_names_missing_packages_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = extras.missing_packages(MODEL_CARD)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(import_module("quantkit.cook.source"), "plan_convert", refuse)
    hide(monkeypatch, REPORT)
    text = tmp_path / "text.txt"
    text.write_text("a text\n" * 99)
    settings = {"targets": ["Q4_K_M"], "output": str(tmp_path / "out"), "calibration": {"text": [str(text)]}}
    with pytest.raises(MissingPackages) as caught:
        plan_cook(config_from({"model": str(tmp_path), **settings}, "test", tmp_path))
    assert asked_for(caught.value) == {"convert", "report"}


def test_commands_with_a_plot_name_both(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = data / "tiny-moe-bf16.gguf"
    hide(monkeypatch, SEARCH, PLOT, CHAT)
    path = tmp_path / "s.json"
    path.write_text("{}")
    lines = {
        "search": ["search", "-s", str(path), "--front", "front.csv", "--plot", "x.svg"],
        "run": ["imatrix", "-m", str(model), "--chat", str(path), "--layer-similarity", "--plot", "x.svg"],
    }
    for extra, line in lines.items():
        result = CliRunner().invoke(cli, line)
        assert result.exit_code == 1, result.output
        assert f"gguf-quantkit[plot,{extra}]" in result.output


@pytest.mark.parametrize("command", [[], ["recipe"], ["cache"]], ids=lambda command: "-".join(["quantkit", *command]))
def test_help_texts_keep_their_lines(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantkit.cli import main

    monkeypatch.setattr(sys, "argv", ["quantkit", *command])
    with pytest.raises(SystemExit) as exit_info:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2
    assert lines[0].startswith("Usage: quantkit")
    assert len(lines) > 8
    assert "\\n" not in "".join(lines)
