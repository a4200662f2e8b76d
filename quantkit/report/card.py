"""The model card: the report as Markdown, with front matter for model hubs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence

from quantkit.activations import MEANINGS
from quantkit.formats.gguf import parse_split_path
from quantkit.names import printable
from quantkit.report.conclusion import SCORE_EXPLANATION, better_file, perplexity_warning
from quantkit.report.data import File, Mmproj, Report
from quantkit.report.tables import Cell, files_table, scores_table, support_table, texts_table
from quantkit.units import PLUS_MINUS

_HUB = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)/?")
#: Characters with a meaning in Markdown or HTML.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$])")

#: Words that YAML 1.1 reads as booleans or null.
_YAML_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}

#: Advice up to a mean KL divergence in nats, the upper end of its 95 % interval.
_ADVICE = (
    (0.003, "practically the base model"),
    (0.02, "very close to the base: a good default"),
    (0.08, "close to the base, if the larger files do not fit"),
    (0.25, "noticeable losses, if memory is short"),
    (float("inf"), "severe losses, only if nothing else fits"),
)


def card_text(report: Report, base_model: str = "", license: str = "") -> str:  # noqa: A002
    """Return a model card, with files by size; ``base_model`` and ``license`` replace those of the metadata."""
    report = report.by_size()
    front_matter = _front_matter(report, base_model, license)
    parts = [front_matter, f"# {_escape_markdown(report.title)}", "## Which file?", _files_table(report)]
    parts += _measurement(report)
    by_text = texts_table(report)
    if by_text.rows:
        parts += ["## Texts", _markdown_table([c.label for c in by_text.columns], by_text.rows)]
    scores = scores_table(report)
    if scores.rows:
        parts += ["## Tasks", _markdown_table([c.label for c in scores.columns], scores.rows), SCORE_EXPLANATION]
    if report.imatrix is not None:
        names = ", ".join(map(_escape_markdown, report.imatrix.datasets)) or _escape_markdown(report.imatrix.name)
        parts.append(f"Importance matrix: {names}; {100 * report.imatrix.share:.4g} % of the matrices have data.")
    exact = [(_escape_markdown(f.name), *f.exact) for f in report.files if f.exact is not None]
    parts += [f"In {name}, {n} of {total} weights are exactly those of the source." for name, n, total in exact]
    parts += ["## Download", _download(report)]
    table = support_table(report)
    parts += ["## Runtimes", _markdown_table([c.label for c in table.columns], table.rows)]
    commands = [f.command for f in report.files if f.command]
    if commands:
        files = "the text models" if report.mmproj else "the files"
        parts += ["## Provenance", f"These commands reproduce {files}:", _fence(commands)]
    parts.append(f"Report by quantkit {report.version}, {report.made}.")
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- front matter


def _front_matter(report: Report, base_model: str, license: str) -> str:  # noqa: A002
    metadata = dict(report.model.card)
    base = base_model or _base_model(metadata)
    license_id = license or metadata.get("general.license", "")
    lines = ["---"]
    lines.append(f"base_model: {_yaml(base)}" if base else "base_model: # organization/name; --base-model sets it")
    lines += ["base_model_relation: quantized", "quantized_by: # your name", "library_name: gguf"]
    lines.append(f"pipeline_tag: {_pipeline_tag(report)}")
    lines.append(f"license: {_yaml(license_id)}" if license_id else "license: # of the base model; --license sets it")
    for key, name in (("general.license.name", "license_name"), ("general.license.link", "license_link")):
        if metadata.get(key) and not license:
            lines.append(f"{name}: {_yaml(metadata[key])}")
    if metadata.get("general.languages"):
        lines += ["language:", *(f"- {_yaml(language)}" for language in metadata["general.languages"].split(","))]
    tags = ["gguf", "quantized", report.model.architecture]
    tags += ["imatrix"] if any("quantize.imatrix.file" in dict(f.provenance) for f in report.files) else []
    tags += [tag for tag in metadata.get("general.tags", "").split(",") if tag and tag not in tags]
    return "\n".join([*lines, "tags:", *(f"- {_yaml(tag)}" for tag in tags), "---"])


def _pipeline_tag(report: Report) -> str:
    """Return the hub's task of a model: of text alone, or with the inputs that its encoders take."""
    encoders = {name for f in report.mmproj for name in f.encoders}
    if len(encoders) > 1:
        return "any-to-any"
    return {"vision": "image-text-to-text", "audio": "audio-text-to-text"}.get("".join(encoders), "text-generation")


def _base_model(metadata: dict[str, str]) -> str:
    """Return the name of the base model on the hub; "" if the metadata lack it."""
    keys = ("general.source.repo_url", "general.repo_url", "general.base_model.0.repo_url")
    return next((m[1] for key in keys if (m := _HUB.fullmatch(metadata.get(key, "")))), "")


def _yaml(text: str) -> str:
    """Return a YAML scalar: a plain word, or a JSON string, which YAML includes."""
    is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) and text.lower() not in _YAML_WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------- the table of files


def _files_table(report: Report) -> str:
    """Return the table of files, with advice, size as hubs show it, preset and most frequent types."""
    table = files_table(report)
    rows = [
        (
            name,
            Cell(advice(f, report.files)),
            Cell(decimal_size(f.nbytes)),
            *numbers,
            Cell(preset_name(f)),
            Cell(_types(f)),
        )
        for f, (name, *numbers) in zip(report.files, table.rows, strict=True)
    ]
    rows += [
        (
            Cell(f.name),
            Cell(f"{f.title}: beside any file above; not measured"),
            Cell(decimal_size(f.nbytes)),
            *(Cell("") for _ in table.columns[1:]),
            Cell("mmproj"),
            Cell(_types(f)),
        )
        for f in report.mmproj
    ]
    first, *labels = (c.label for c in table.columns)
    return _markdown_table([first, "which one?", "download", *labels, "preset", "types"], rows)


def advice(file: File, files: Sequence[File]) -> str:
    """Return for whom a file is, by its divergence; "not measured" without one."""
    better = better_file(file, files)
    if better is not None:
        return f"no: {better.name} is smaller and closer to the base"
    if file.quality is None or file.quality.kld is None:
        return "not measured"
    highest = file.quality.kld.interval()[1] + file.quality.bound
    return next(text for limit, text in _ADVICE if highest <= limit)


def decimal_size(nbytes: int) -> str:
    """Return a size in GB, or MB below 0.1 GB: decimal, as model hubs show them."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def preset_name(file: File) -> str:
    """Return the preset of a file; "recipe" if rules chose types of tensors."""
    recipe = dict(file.provenance).get("quantkit.quantize.recipe", "")
    has_rules = any(line and not line.startswith("--") for line in recipe.split("\n")[1:])
    return "recipe" if has_rules else file.preset or "-"


def _types(file: File | Mmproj) -> str:
    """Return the most frequent types of a file's tensors."""
    names = [name for name, _, _ in file.by_type]
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _measurement(report: Report) -> list[str]:
    """Return the paragraph that explains the numbers of the table."""
    quality = next((f.quality for f in report.files if f.quality is not None), None)
    if quality is None:
        return []
    text = (
        f" of {_escape_markdown(report.text.name)} (SHA-256 `{report.text.sha256}`)" if report.text is not None else ""
    )
    lines = [f"Measured on {quality.n_scored:,} tokens{text}, in chunks of {quality.n_ctx}; {PLUS_MINUS}."]
    lines.append(f"Measured with {MEANINGS[quality.activations]}.")
    if quality.kld is not None:
        limits = ", ".join(f"{limit:g}" for limit, _ in _ADVICE[:-1])
        lines.append("KL divergence is the mean over these tokens, from the base model's predictions; lower is better.")
        lines.append(f"The advice follows the upper end of its 95 % interval: up to {limits} nats, or more.")
    return [" ".join([*lines, perplexity_warning(report.files)]).rstrip()]


# ---------------------------------------------------------------- downloads


def _download(report: Report) -> str:
    """Return the commands that download a file and its encoders, if any, and run both."""
    file = recommended_file(report)
    command = f"hf download YOUR-NAME/{_repository(report)} {_file_arguments(file)} --local-dir ."
    if not report.mmproj:
        return _fence([command])
    mmproj = f"hf download YOUR-NAME/{_repository(report)} {shlex.quote(report.mmproj[0].name)} --local-dir ."
    return _fence([command, mmproj, run_command(report)])


def recommended_file(report: Report) -> File:
    """Return the smallest file that the advice calls good, else the largest."""
    good = [f for f in report.files if better_file(f, report.files) is None and _is_good(f)]
    return good[0] if good else report.files[-1]


def run_command(report: Report) -> str:
    """Return the command that runs a file with its encoders; "" without encoders."""
    if not report.mmproj:
        return ""
    names = (recommended_file(report).name, report.mmproj[0].name)
    model, mmproj = (shlex.quote(printable(name)) for name in names)
    return f"llama-server -m {model} --mmproj {mmproj}"


def _is_good(file: File) -> bool:
    return file.quality is not None and file.quality.kld is not None and file.quality.kld.interval()[1] <= _ADVICE[1][0]


def _repository(report: Report) -> str:
    """Return the usual name of a repository of quantizations of the model."""
    return re.sub(r"[^\w.-]+", "-", printable(report.model.name)).strip("-.") + "-GGUF"


def _file_arguments(file: File) -> str:
    split = parse_split_path(file.name) if file.shards > 1 else None
    name = printable(file.name) if split is None else f"{printable(split[0])}-*.gguf"
    return shlex.quote(name) if split is None else f"--include {shlex.quote(name)}"


# ---------------------------------------------------------------- Markdown


def _escape_markdown(text: str) -> str:
    """Return text with Markdown escaped."""
    return _SPECIAL.sub(r"\\\1", printable(text))


def _markdown_table(labels: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [" | ".join(map(_escape_markdown, labels)), " | ".join("---" for _ in labels)]
    lines += [" | ".join(_escape_markdown(cell.text) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _fence(commands: Sequence[str]) -> str:
    fence = "```"
    while any(fence in command for command in commands):
        fence += "`"
    return "\n".join([f"{fence}sh", *map(printable, commands), fence])
