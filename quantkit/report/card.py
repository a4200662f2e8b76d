"""The model card: the report as Markdown, with front matter for model hubs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from quantkit.names import printable
from quantkit.report.conclusion import perplexity_warning
from quantkit.report.data import Report
from quantkit.report.tables import Cell, files_table, support_table
from quantkit.units import PLUS_MINUS

_HUB = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)/?")
#: Characters with a meaning in Markdown or HTML.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$])")

#: Words that YAML 1.1 reads as booleans or null.
_YAML_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}


def card_text(report: Report) -> str:
    """Return a model card."""
    parts = [_front_matter(report), f"# {_escape_markdown(report.title)}", "## Files", _files_table(report)]
    qualities = [f.quality for f in report.files if f.quality is not None]
    if qualities:
        q = qualities[0]
        text = (
            f" of {_escape_markdown(report.text.name)} (SHA-256 `{report.text.sha256}`)"
            if report.text is not None
            else ""
        )
        parts.append(
            f"Measured on {q.n_scored:,} tokens{text}, in chunks of {q.n_ctx};"
            f" {PLUS_MINUS}. KL divergence is the mean over tokens, from the base's predictions."
            f" {perplexity_warning(report.files)}".rstrip()
        )
    if report.imatrix is not None:
        names = ", ".join(map(_escape_markdown, report.imatrix.datasets)) or _escape_markdown(report.imatrix.name)
        parts.append(f"Importance matrix: {names}; {100 * report.imatrix.share:.4g} % of the matrices have data.")
    table = support_table(report)
    parts += ["## Runtimes", _markdown_table([c.label for c in table.columns], table.rows)]
    commands = [f.command for f in report.files if f.command]
    if commands:
        parts += ["## How they were made", _fence(commands)]
    parts.append(f"Report by quantkit {report.version}, {report.made}.")
    return "\n\n".join(parts) + "\n"


def _front_matter(report: Report) -> str:
    metadata = dict(report.model.card)
    lines = ["---"]
    base = _base_model(metadata)
    lines.append(f"base_model: {_yaml(base)}" if base else "base_model: # organization/name")
    lines += ["base_model_relation: quantized", "quantized_by: # your name", "library_name: gguf"]
    lines.append("pipeline_tag: text-generation")
    lines.append(
        f"license: {_yaml(metadata['general.license'])}"
        if metadata.get("general.license")
        else "license: # of the base"
    )
    for key, name in (("general.license.name", "license_name"), ("general.license.link", "license_link")):
        if metadata.get(key):
            lines.append(f"{name}: {_yaml(metadata[key])}")
    if metadata.get("general.languages"):
        lines += ["language:", *(f"- {_yaml(language)}" for language in metadata["general.languages"].split(","))]
    tags = ["gguf", "quantized", report.model.architecture]
    tags += ["imatrix"] if any("quantize.imatrix.file" in dict(f.provenance) for f in report.files) else []
    tags += [tag for tag in metadata.get("general.tags", "").split(",") if tag and tag not in tags]
    return "\n".join([*lines, "tags:", *(f"- {_yaml(tag)}" for tag in tags), "---"])


def _base_model(metadata: dict[str, str]) -> str:
    """Return the name of the base model on the hub; "" if the metadata lack it."""
    keys = ("general.source.repo_url", "general.repo_url", "general.base_model.0.repo_url")
    return next((m[1] for key in keys if (m := _HUB.fullmatch(metadata.get(key, "")))), "")


def _yaml(text: str) -> str:
    """Return a YAML scalar: a plain word, or a JSON string, which YAML includes."""
    is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) and text.lower() not in _YAML_WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _escape_markdown(text: str) -> str:
    """Return text with Markdown escaped."""
    return _SPECIAL.sub(r"\\\1", printable(text))


def _files_table(report: Report) -> str:
    """Return the table of files, with their presets and most frequent types."""
    table = files_table(report)
    rows = []
    for file, row in zip(report.files, table.rows, strict=True):
        types = ", ".join(name for name, _, _ in file.by_type[:3])
        rows.append((row[0], Cell(file.preset or "-"), *row[1:], Cell(types)))
    labels = [c.label for c in table.columns]
    return _markdown_table([labels[0], "preset", *labels[1:], "types"], rows)


def _markdown_table(labels: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [" | ".join(map(_escape_markdown, labels)), " | ".join("---" for _ in labels)]
    lines += [" | ".join(_escape_markdown(cell.text) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _fence(commands: Sequence[str]) -> str:
    fence = "```"
    while any(fence in command for command in commands):
        fence += "`"
    return "\n".join([f"{fence}sh", *map(printable, commands), fence])
