"""Pooling of embeddings: sentence-transformers files to keys, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Config, Json, read_json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import Keys
from quantkit.errors import FormatError
from quantkit.formats.outputs import read_text


def _read_list(path: Path) -> list[Any]:
    try:
        value = json.loads(read_text(path).decode())
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: not JSON: {e}", "QK-E111") from None
    return value if isinstance(value, list) else []


def read_modules(folder: Path) -> list[Json]:
    """Return the entries of modules.json, those of a checkpoint of sentence-transformers; [] without the file."""
    path = folder / "modules.json"
    return [module for module in (_read_list(path) if path.exists() else []) if isinstance(module, dict)]


_POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}


def set_pooling(keys: Keys, config: Config) -> None:
    """Set the pooling if the model is for embeddings (TextModel._try_set_pooling_type)."""
    folder = config.path.parent
    pools = (module for module in read_modules(folder) if str(module.get("type", "")).endswith("Pooling"))
    module = next(pools, None)
    if module is not None:
        path = folder / str(module.get("path", "")) / "config.json"
        pooling = read_json(path)
        modes = (
            k
            for name, k in (("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "lasttoken"))
            if pooling.get(f"pooling_mode_{name}")
        )
        mode = next(modes, pooling.get("pooling_mode"))
        if mode not in _POOLING:
            raise FormatError(f"{path}: only the pooling types {', '.join(_POOLING)} are supported", "QK-E305")
        keys.u32(".pooling_type", _POOLING[mode])
    if (classifier := config.get("classifier_pooling")) is not None:
        if classifier not in ("cls", "mean"):
            raise FormatError(
                f"{config.path}: classifier_pooling is {classifier!r}; supported are cls and mean", "QK-E305"
            )
        keys.u32(".classifier.pooling_type", _POOLING[classifier])


def pooling_files(meta: ModelMetadata) -> dict[str, bytes]:
    """Return the sentence-transformers files that define the pooling of tokens into one embedding."""
    kind = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}.get(meta.get(".pooling_type") or 0)
    if kind is None:
        return {}
    pooling: Json = {"word_embedding_dimension": meta.number(".embedding_length")}
    pooling |= {f"pooling_mode_{name}": name == kind for name in ("cls_token", "mean_tokens", "lasttoken")}
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(parts)
    ]
    return {
        name: (json.dumps(value, indent=2) + "\n").encode()
        for name, value in (("modules.json", modules), ("1_Pooling/config.json", pooling))
    }
