"""``quantkit doctor``."""

from __future__ import annotations

import sys

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand
from quantkit.cli._table import fold
from quantkit.doctor import Diagnosis, Finding, doctor
from quantkit.names import printable


@click.command("doctor", cls=GroupedCommand)
@json_option("the findings")
def command(json_to: JsonOutput) -> None:
    """Check this machine: packages, CPU, GPUs, memory and disk.

    Checks Python, packages and extras, CPU features, caches, memory, disk, GPUs and
    programs of llama.cpp. Nothing is downloaded or compiled.

    Exit code 0 if all is well, 1 if there are warnings (something optional is
    missing or limited), 2 if quantkit cannot work.

    \b
    quantkit doctor
    quantkit doctor --json
    """
    diagnosis = doctor()
    json_to.print(lambda: _text(diagnosis), diagnosis.as_dict)
    sys.exit(diagnosis.exit_code)


def _text(diagnosis: Diagnosis) -> str:
    width = max(len(finding.name) for finding in diagnosis.findings)
    lines = [line for finding in diagnosis.findings for line in _lines(finding, width)]
    return "\n".join([*lines, "", _SUMMARIES[diagnosis.exit_code]])


_SUMMARIES = ("no problems found", "quantkit works; see the warnings", "quantkit cannot work; see the errors")


def _lines(finding: Finding, width: int) -> list[str]:
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return [fold(printable(f"{finding.state:<7}  {finding.name:<{width}}  {finding.text}{remedy}"), width + 11)]
