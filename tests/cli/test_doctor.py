"""`quantkit doctor`: findings, exit codes, and the same for programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import quantkit
from quantkit.cli import cli
from quantkit.doctor import Diagnosis, Finding, State
from quantkit.extras import ALL, ON_REQUEST, Extra

ROOT = Path(__file__).parents[2]
#: The module, whose name is the function's in the package.
MODULE = sys.modules[Diagnosis.__module__]


def test_this_machine_passes() -> None:
    diagnosis = quantkit.doctor()
    names = [f.name for f in diagnosis.findings]
    assert {"Python", "packages", "CPU", "kernel cache", "memory", "disk", "[search]", "[ray]"} <= set(names)
    assert diagnosis.exit_code in (0, 1)
    assert all(f.remedy for f in diagnosis.findings if f.state != "ok")


def test_json_and_text_agree() -> None:
    text, data = (CliRunner().invoke(cli, ["doctor", *options]) for options in ((), ("--json",)))
    findings = json.loads(data.stdout)["findings"]
    assert [line.split()[0] for line in text.stdout.splitlines()[: len(findings)]] == [f["state"] for f in findings]
    assert text.exit_code == data.exit_code == json.loads(data.stdout)["exit_code"]


@pytest.mark.parametrize(
    ("states", "code"), [(("ok",), 0), (("ok", "warning"), 1), (("warning", "error", "ok"), 2)], ids=str
)
def test_the_worst_finding_is_the_exit_code(states: tuple[State, ...], code: int) -> None:
    assert Diagnosis(tuple(Finding("x", state, "") for state in states)).exit_code == code


def test_a_missing_extra_is_a_warning_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "ALL", (Extra("plot", "plots", {"no_such_module": "no-such-package"}),))
    finding = next(f for f in quantkit.doctor().findings if f.name == "[plot]")
    assert finding.state == "warning"
    assert "no-such-package" in finding.text
    assert finding.remedy == "pip install 'gguf-quantkit[plot]'"


def test_a_failing_check_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError("no disk")

    monkeypatch.setattr("shutil.disk_usage", fail)
    finding = next(f for f in quantkit.doctor().findings if f.name == "disk")
    assert finding.state == "error"
    assert "no disk" in finding.text


def test_listed_extras_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for extra in (*ALL, *ON_REQUEST):
        line = next(line for line in text.splitlines() if line.startswith(f"{extra.name} = "))
        assert all(package.partition("[")[0] in line for package in extra.packages.values()), extra
