"""Report the metadata outside the architecture that a conversion of the export would lose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.general import ParameterCount, read_general
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import Field, GGUFFile

#: Keys that follow from the file itself.
_OF_FILE = {f"general.{key}" for key in ("architecture", "alignment", "file_type", "quantization_version", "type")}
_MAX_NAMES = 6


def compare_keys(model: GGUFFile, folder: Path, row: Architecture, config: Config, *, tokenizer: bool) -> list[str]:
    """Return notes on keys of a file that the checkpoint in ``folder`` lacks or changes."""
    keys = Keys(row.arch, config.path)
    read_general(folder, ParameterCount(0, 0, 0, 0)).write(keys)
    notes = _lost_keys("general.", model.fields, keys.fields)
    if not tokenizer:
        return notes
    pre_name = model.get("tokenizer.ggml.model") in ("gpt2", "bert")  # the other kinds have no pre-tokenizer
    try:
        row.vocab(Vocabulary(folder, config, keys, model.get("tokenizer.ggml.pre") if pre_name else None))
    except QuantkitError as e:
        return [*notes, f"`quantkit convert` does not accept this vocabulary: {e.message}"]
    notes += _lost_keys("tokenizer.", model.fields, keys.fields)
    extra_keys = [key for key in keys.fields if key.startswith("tokenizer.") and key not in model.fields]
    return notes + ([f"converting it back adds {_list_keys(extra_keys)}"] if extra_keys else [])


def _lost_keys(prefix: str, before: Mapping[str, Field], after: Mapping[str, Field]) -> list[str]:
    prefixed_keys = [key for key in before if key.startswith(prefix) and key not in _OF_FILE]
    missing = [key for key in prefixed_keys if key not in after]
    changed_keys = [key for key in prefixed_keys if key in after and before[key].encode() != after[key].encode()]
    notes = [f"converting it back loses {_list_keys(missing)}"] if missing else []
    return notes + ([f"converting it back changes {_list_keys(changed_keys)}"] if changed_keys else [])


def _list_keys(keys: Iterable[str]) -> str:
    names = sorted(keys)
    remainder = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + remainder
