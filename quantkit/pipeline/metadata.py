"""The metadata of an output: the source's, edited as llama-quantize does (``provenance`` adds the recipe).

Setting a key moves it to the end of the list, as llama.cpp's gguf_set_val_* do, or keeps its place, as in ik_llama.cpp,
so that headers are byte-identical.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from quantkit.errors import RecipeError
from quantkit.formats.gguf import SPLIT_KEYS, Field, ValueType
from quantkit.formats.imatrix import Imatrix
from quantkit.names import file_name

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
#: Bytes of a file or dataset name that llama-quantize keeps (char val_str[128]).
_NAME_BYTES = 127


class Metadata:
    """An ordered, editable list of fields; ``ik``: edited as in ik_llama.cpp."""

    def __init__(self, fields: Iterable[Field], *, ik: bool = False) -> None:
        self._fields = {field.key: field for field in fields}
        self.ik = ik

    def set(self, field: Field) -> None:
        """Set a field; an existing key moves to the end, or keeps its place as in ik_llama.cpp."""
        if not self.ik:
            self._fields.pop(field.key, None)
        self._fields[field.key] = field

    def replace(self, field: Field) -> None:
        """Set a field in its place."""
        self._fields[field.key] = field

    def remove(self, *keys: str) -> None:
        for key in keys:
            self._fields.pop(key, None)

    def get(self, key: str) -> Field | None:
        return self._fields.get(key)

    def fields(self) -> list[Field]:
        return list(self._fields.values())


def prune_names(names: Iterable[str], prune: Sequence[int]) -> dict[str, str]:
    """Return source name -> output name of the tensors that remain when layers are dropped and the rest renumbered.

    Raises RecipeError for layers that do not exist, or if none remains.
    """
    names = list(names)
    if not prune:
        return {name: name for name in names}
    layers = sorted({int(m[1]) for n in names if (m := _BLOCK.search(n))})
    unknown = sorted(set(prune) - set(layers))
    if unknown:
        available = f"the model has {layers[0]} .. {layers[-1]}" if layers else "the model has none"
        raise RecipeError(f"--prune-layers: no layer {unknown[0]}; {available}", "QK-E203")
    remaining = [layer for layer in layers if layer not in set(prune)]
    if not remaining:
        raise RecipeError("--prune-layers leaves no layer", "QK-E203")
    number = {layer: i for i, layer in enumerate(remaining)}
    renamed = {}
    for name in names:
        match = _BLOCK.search(name)
        if match is None:
            renamed[name] = name
        elif int(match[1]) in number:
            renamed[name] = f"{name[: match.start(1)]}{number[int(match[1])]}{name[match.end(1) :]}"
    return renamed


def prune_metadata(metadata: Metadata, arch: str, prune: Sequence[int]) -> list[str]:
    """Adapt the metadata to a model without the layers ``prune``; return notes for the user.

    The layer count and the counts of leading or trailing layers go down, and arrays with an entry per layer lose those
    of the dropped layers (llama-quantize keeps them, and the file does not load).
    """
    key = f"{arch}.block_count"
    count = metadata.get(key)
    if count is None:
        raise RecipeError(f"--prune-layers: the metadata has no {key}", "QK-E123")
    n = int(count.value)
    dropped = set(prune)
    notes = []
    indices = [i for i in range(n) if i not in dropped]
    metadata.set(Field.of(key, len(indices), count.type))
    for field in metadata.fields():
        if not field.key.startswith(f"{arch}.") or field.item_type is None or field.count != n:
            continue
        values = [field.value[i] for i in indices]
        metadata.replace(Field.of(field.key, values, ValueType.ARRAY, field.item_type))
        notes.append(f"{field.key}: dropped {n - len(indices)} of its {n} per-layer values with their layers")
    shrinking: dict[str, Callable[[int], int]] = {
        "leading_dense_block_count": lambda v: sum(i < v for i in dropped),
        "nextn_predict_layers": lambda v: sum(i >= n - v for i in dropped),
    }
    for name, count_dropped in shrinking.items():
        count = metadata.get(f"{arch}.{name}")
        if count is not None and count.item_type is None and count_dropped(count.value):
            metadata.replace(Field.of(count.key, count.value - count_dropped(count.value), count.type))
            notes.append(f"{count.key}: {count.value} becomes {count.value - count_dropped(count.value)}")
    return notes


def set_quantization(metadata: Metadata, ftype: int, overrides: Iterable[Field], extra: Iterable[Field]) -> None:
    """Set the keys that llama-quantize sets in every file, then the user's and ``extra``; drop split keys.

    ik_llama.cpp sets general.file_type last, which matters in files without one; the user's value takes precedence.
    """
    ftype_field = Field.of("general.file_type", ftype, ValueType.UINT32)
    metadata.set(Field.of("general.quantization_version", 2, ValueType.UINT32))
    metadata.remove(*SPLIT_KEYS)
    fields = [*overrides, *extra]
    for field in [*fields, ftype_field] if metadata.ik else [ftype_field, *fields]:
        if field is not ftype_field or all(f.key != field.key for f in fields):
            metadata.set(field)


def imatrix_fields(imatrix: Imatrix, n_entries: int, *, hide: bool, ik: bool, folders: bool) -> list[Field]:
    """Return llama-quantize's keys about an importance matrix; ``hide`` as ik_llama.cpp's --hide-imatrix does.

    ``folders``: keep the paths of files as given, as llama-quantize does, not only their names.
    """
    format_name = _truncate if folders else lambda path: _truncate(file_name(path))
    dataset = imatrix.datasets[0] if imatrix.datasets else None
    file = "top_secret" if hide else format_name(str(imatrix.path))
    count = ValueType.INT32 if ik else ValueType.UINT32
    fields = [Field.of("quantize.imatrix.file", file, ValueType.STRING)]
    if dataset is not None:
        fields.append(
            Field.of("quantize.imatrix.dataset", "top_secret" if hide else format_name(dataset), ValueType.STRING)
        )
    fields.append(Field.of("quantize.imatrix.entries_count", 0 if hide else n_entries, count))
    if imatrix.chunk_count > 0:
        fields.append(Field.of("quantize.imatrix.chunks_count", 0 if hide else imatrix.chunk_count, count))
    return fields


def _truncate(text: str) -> str:
    return text.encode("utf-8", "surrogateescape")[:_NAME_BYTES].decode("utf-8", "surrogateescape")
