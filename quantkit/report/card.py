"""The card: the report as Markdown, with the front matter that model hubs read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from quantkit.names import printable
from quantkit.report.data import Report
from quantkit.report.tables import Cell, files_table, support_table

_HUB = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)/?")
#: Characters that Markdown or HTML would read.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$])")


def card_text(report: Report) -> str:
    """Return a model card."""
    parts = [_front_matter(report), f"# {_plain(report.title)}", "## Files", _table(report)]
    qualities = [f.quality for f in report.files if f.quality is not None]
    if qualities:
        q = qualities[0]
        text = f" of {_plain(report.text.name)} (SHA-256 `{report.text.sha256}`)" if report.text is not None else ""
        parts.append(
            f"Measured on {q.n_scored:,} tokens{text}, in chunks of {q.n_ctx};"
            " ± is half of a 95 % interval. KL divergence is the mean over tokens, from the base's predictions."
        )
    if report.imatrix is not None:
        names = ", ".join(map(_plain, report.imatrix.datasets)) or _plain(report.imatrix.name)
        parts.append(f"Importance matrix: {names}; {100 * report.imatrix.share:.4g} % of the matrices have data.")
    found = support_table(report)
    parts += ["## Runtimes", _markdown([c.label for c in found.columns], found.rows)]
    commands = [f.command for f in report.files if f.command]
    if commands:
        parts += ["## How they were made", _fenced(commands)]
    parts.append(f"Report by quantkit {report.version}, {report.made}.")
    return "\n\n".join(parts) + "\n"


def _front_matter(report: Report) -> str:
    known = dict(report.model.card)
    lines = ["---"]
    base = _base_model(known)
    lines.append(f"base_model: {_yaml(base)}" if base else "base_model: # organization/name")
    lines += ["base_model_relation: quantized", "quantized_by: # your name", "library_name: gguf"]
    lines.append("pipeline_tag: text-generation")
    lines.append(
        f"license: {_yaml(known['general.license'])}" if known.get("general.license") else "license: # of the base"
    )
    for key, name in (("general.license.name", "license_name"), ("general.license.link", "license_link")):
        if known.get(key):
            lines.append(f"{name}: {_yaml(known[key])}")
    if known.get("general.languages"):
        lines += ["language:", *(f"- {_yaml(each)}" for each in known["general.languages"].split(","))]
    tags = ["gguf", "quantized", report.model.architecture]
    tags += ["imatrix"] if any("quantize.imatrix.file" in dict(f.provenance) for f in report.files) else []
    tags += [tag for tag in known.get("general.tags", "").split(",") if tag and tag not in tags]
    return "\n".join([*lines, "tags:", *(f"- {_yaml(tag)}" for tag in tags), "---"])


def _base_model(known: dict[str, str]) -> str:
    """Return the base's name on the hub, "" if the metadata do not tell."""
    keys = ("general.source.repo_url", "general.repo_url", "general.base_model.0.repo_url")
    return next((m[1] for key in keys if (m := _HUB.fullmatch(known.get(key, "")))), "")


def _yaml(text: str) -> str:
    """Return a scalar: a plain word, or in quotes, of which JSON's are YAML's."""
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) and text.lower() not in (
        "yes",
        "no",
        "on",
        "off",
        "true",
        "false",
        "null",
        "y",
        "n",
    )
    return text if plain else json.dumps(text, ensure_ascii=False)


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", printable(text))


def _table(report: Report) -> str:
    """Return the table of files, with links to them, and the types they have most of."""
    found = files_table(report)
    rows = []
    for file, row in zip(report.files, found.rows, strict=True):
        types = ", ".join(name for name, _, _ in file.by_type[:3])
        rows.append((row[0], Cell(file.preset or "-"), *row[1:], Cell(types)))
    labels = [c.label for c in found.columns]
    return _markdown([labels[0], "preset", *labels[1:], "types"], rows)


def _markdown(labels: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [" | ".join(map(_plain, labels)), " | ".join("---" for _ in labels)]
    lines += [" | ".join(_plain(cell.text) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _fenced(commands: Sequence[str]) -> str:
    fence = "```"
    while any(fence in each for each in commands):
        fence += "`"
    return "\n".join([f"{fence}sh", *map(printable, commands), fence])
