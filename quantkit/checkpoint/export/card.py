"""general.* as the front matter of README.md, from which `quantkit convert` reads it (``general.read_general``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quantkit.checkpoint.general import RELATED, parse_related
from quantkit.formats.gguf import GGUFFile

#: Key of the model card -> key after ``general.``
_NAMES = {
    **{
        name: name
        for name in ("name", "author", "version", "organization", "description", "finetune", "basename", "size_label")
    },
    "license": "license",
    "license_name": "license.name",
    "license_link": "license.link",
    **{name: f"source.{name}" for name in ("url", "doi", "uuid", "repo_url")},
}
_LISTS = {"tags": "tags", "language": "languages"}
_MOST_RELATED = 1 << 10


def card_files(model: GGUFFile) -> dict[str, bytes]:
    """Return README.md if the metadata has anything for it."""
    lines = [f"{key}: {_yaml(value)}" for key, value in _entries(model)]
    return {"README.md": "\n".join(["---", *lines, "---", ""]).encode("utf-8", "replace")} if lines else {}


def _entries(model: GGUFFile) -> Iterator[tuple[str, Any]]:
    for key, name in _NAMES.items():
        if isinstance(value := model.get(f"general.{name}"), str):
            yield key, value
    for key, kind in (("base_model", "base_model"), ("datasets", "dataset")):
        count = model.get(f"general.{kind}.count")
        if isinstance(count, int) and 0 < count <= _MOST_RELATED:
            yield key, [_shorten_related(model, f"general.{kind}.{i}.") for i in range(count)]
    for key, name in _LISTS.items():
        if isinstance(value := model.get(f"general.{name}"), list):
            yield key, value


def _shorten_related(model: GGUFFile, prefix: str) -> Any:
    """Return a short text for another model or a dataset if it parses to all of its fields, else the fields."""
    entry = {name: value for name in RELATED if (value := model.get(prefix + name)) is not None}
    address = str(entry.get("repo_url", ""))
    short = (address.removeprefix("https://huggingface.co/"), address)
    return next((text for text in short if text and parse_related(text, 0) == entry), entry)


def _yaml(value: Any) -> str:
    """Return a value as JSON, which YAML is, on one line however text is cut into lines."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
