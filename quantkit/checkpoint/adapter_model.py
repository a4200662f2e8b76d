"""Models that are released as a LoRA adapter of a base: the checkpoint of the base, and its configuration.

The weights and the tokenizer are the base's; the adapter is merged into them, as PEFT does it. Facts of llama.cpp
b11434 (conversion/lev.py), which downloads the base.
"""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.checkpoint.config import Config, Json, optional_json, read_json, unify_text_config
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.formats.gguf.rules import short
from quantkit.formats.remote import locate

ADAPTER_FILE = "adapter_config.json"
#: Files with the revision of the base, and its key there.
_REVISIONS = ((ADAPTER_FILE, "revision"), ("training_config.json", "base_revision"), ("schema_config.json", "revision"))
_REPOSITORY, _REVISION = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*"), re.compile(r"[\w-][\w.-]*")


class AdapterConfig(Config):
    """The configuration of the base, with the directory of the adapter; ``path`` is the base's config.json."""

    def __init__(self, base: Path, adapter: Path, values: Json) -> None:
        super().__init__(base / "config.json", values)
        self.adapter = adapter


def adapter_of(config: Config) -> Path:
    """Return the directory of the adapter."""
    assert isinstance(config, AdapterConfig)
    return config.adapter


def read_adapter_model(adapter: Path, name: str, base: Path | None) -> AdapterConfig:
    """Return the configuration of a model of the class ``name``.

    Args:
        adapter: its directory.
        name: of the class, which takes the place of the base's.
        base: the checkpoint of the base; None for the one that the adapter names: a directory, or a repository of the
            Hugging Face Hub.

    Raises:
        FormatError: a file is damaged, or the base is not a checkpoint.
        RecipeError: the adapter names no base that can be read.
    """
    if base is not None:
        return _config_of(base, adapter, name)
    base = named_base(adapter)
    try:
        return _config_of(base, adapter, name)
    except (QuantkitError, OSError) as e:
        raise RecipeError(
            f"{adapter}: is an adapter of {base}, which cannot be read ({e}): give --base DIR, the checkpoint of its "
            "base",
            "QK-E216",
        ) from None


def named_base(adapter: Path) -> Path:
    """Return the base that an adapter names. Raises RecipeError if it names none."""
    name = read_json(adapter / ADAPTER_FILE).get("base_model_name_or_path")
    revision = next((value for value in _revisions(adapter) if value is not None), None)
    if isinstance(name, str) and name and "\0" not in name:
        if revision is None and Path(name).is_dir():
            return Path(name)
        if _REPOSITORY.fullmatch(name) and (revision is None or _is_revision(revision)):
            return locate(f"hf://{name}" + (f"@{revision}" if revision else ""))
    raise RecipeError(
        f"{adapter / ADAPTER_FILE}: its base is {short(name)}, revision {short(revision)}, neither a directory nor a "
        "repository of the Hugging Face Hub: give --base DIR, the checkpoint of its base",
        "QK-E216",
    )


def _revisions(adapter: Path) -> list[object]:
    return [(optional_json(adapter / file) or {}).get(key) for file, key in _REVISIONS]


def _is_revision(revision: object) -> bool:
    return isinstance(revision, str) and _REVISION.fullmatch(revision) is not None


def _config_of(base: Path, adapter: Path, name: str) -> AdapterConfig:
    path = base / "config.json"
    if not path.is_file():
        raise FormatError(f"{base}: has no config.json, so it is not the checkpoint of a base", "QK-E101")
    return AdapterConfig(base, adapter, {**unify_text_config(read_json(path)), "architectures": [name]})
