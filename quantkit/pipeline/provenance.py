"""Provenance of a file: the keys ``quantkit.*``, except ``quantkit.merge.*``, which serve to undo a merge.

=============================  =========================================================================================
``quantkit.quantize.*``        how the values were encoded: version, recipe, source, SHA-256 of the importance matrix,
                               users' encoders by type
``quantkit.feedback.*``        how error feedback was applied
``quantkit.calibration.*``     a sketch of the text that the importance matrix comes from (quantkit.calibration.overlap)
``quantkit.copy.*``            later copies (COPY, --repack): version, recipe, source, an item for each copy
``quantkit.prune.*``           which experts of the original model the file has; remains when values are encoded again
``quantkit.source.*``          the source's values of the other keys, before it was encoded again
=============================  =========================================================================================

A copy encodes nothing, so all of the source's keys remain valid and are kept. If values are encoded, these keys
describe the source and are renamed: ``quantkit.quantize.recipe`` becomes ``quantkit.source.quantize.recipe``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.imatrix import Imatrix
from quantkit.pipeline.metadata import Metadata

_ROOT = "quantkit."
_MERGE_RECORD = "quantkit.merge."
_CALIBRATION = "quantkit.calibration."
_PRUNE_RECORD = "quantkit.prune."


def is_provenance(key: str) -> bool:
    return key.startswith(_ROOT) and not key.startswith(_MERGE_RECORD)


def drop(metadata: Metadata) -> None:
    """Remove all provenance."""
    metadata.remove(*(f.key for f in metadata.fields() if is_provenance(f.key)))


def record_quantization(
    metadata: Metadata, facts: Mapping[str, str], imatrix: Imatrix | None, feedback: Iterable[Field]
) -> None:
    """Record how values were encoded, and move the source's provenance to ``quantkit.source.*``.

    Args:
        facts: values by key, without ``quantkit.quantize.``.
        imatrix: the importance matrix, whose sketch of its text is copied, so that evaluations can warn.
        feedback: fields ``quantkit.feedback.*``.
    """
    earlier = [f for f in metadata.fields() if is_provenance(f.key) and not f.key.startswith(_PRUNE_RECORD)]
    metadata.remove(*(f.key for f in earlier))
    for field in earlier:
        metadata.set(replace(field, key=f"{_ROOT}source.{field.key.removeprefix(_ROOT)}"))
    for field in imatrix.extra.values() if imatrix is not None else ():
        if field.key.startswith(_CALIBRATION):
            metadata.set(field)
    for key, value in facts.items():
        metadata.set(Field.of(f"quantkit.quantize.{key}", value, ValueType.STRING))
    for field in feedback:
        metadata.set(field)


def record_copy(metadata: Metadata, facts: Mapping[str, str]) -> None:
    """Record that the file is a copy; ``facts``: values by key, without ``quantkit.copy.``, items of their arrays."""
    for name, value in facts.items():
        key = f"quantkit.copy.{name}"
        earlier = metadata.get(key)
        values = list(earlier.value) if earlier is not None and earlier.item_type is ValueType.STRING else []
        metadata.set(Field.of(key, [*values, value], ValueType.ARRAY, ValueType.STRING))
