"""The metadata of the output, in llama-quantize's order, and its provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path, PurePath

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import Field
from quantkit.formats.override import override_file
from quantkit.names import printable, shorten
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline import provenance
from quantkit.pipeline.choose import Request, iteration_order
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.pipeline.lora_source import LoraSource
from quantkit.pipeline.metadata import (
    Metadata,
    imatrix_fields,
    prune_metadata,
    set_quantization,
)
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.presets import FTYPE_UNKNOWN, preset_by_name, repacked_ftype
from quantkit.pipeline.regroup import prune_record
from quantkit.quantize.draft import Draft
from quantkit.version import __version__

#: Maximum length of a value in a recipe: the file contains the complete one under its own key.
_WIDTH = 100
#: Options that recipes do not list: those with their own keys, and rules, which are listed last.
_SEPARATE_OPTIONS = (
    "imatrix",
    "feedback",
    "like",
    "ready_rules",
    "encoders",
    "recipe",
    "tensor_type",
    "tensor_type_file",
    "custom_q",
)


def metadata_of(draft: Draft, request: Request, tensors: Sequence[OutputTensor]) -> tuple[Metadata, list[str]]:
    """Edit the source's metadata in the order of llama-quantize; also return notes."""
    source, options = draft.source, draft.options
    metadata, notes = Metadata(draft.groups.metadata.fields(), ik=draft.as_ik), list[str]()
    ftype = _copied_ftype(draft) if request.copy else draft.preset.ftype
    extra: list[Field] = []
    if draft.imatrix is not None and draft.importance is not None and (n := draft.importance.n_entries):
        extra = imatrix_fields(
            draft.imatrix, n, hide=options.hide_imatrix, ik=draft.as_ik, folders=options.no_provenance
        )
    set_quantization(metadata, ftype, draft.overrides.values(), extra)
    if options.prune_layers:
        notes += prune_metadata(metadata, str(source.get("general.architecture")), options.prune_layers)
        prune_record(metadata, options.prune_layers)
    if options.no_provenance:
        provenance.drop(metadata)
    elif draft.feedback is None and not any(tensor.encoder for tensor in tensors):
        provenance.record_copy(metadata, _facts(draft, request))
    else:
        _record_quantization(metadata, draft, request, tensors)
    return metadata, notes


def _record_quantization(metadata: Metadata, draft: Draft, request: Request, tensors: Sequence[OutputTensor]) -> None:
    imatrix = None if draft.options.hide_imatrix else draft.imatrix
    facts = _facts(draft, request)
    customs = dict.fromkeys(tensor.custom for tensor in tensors if tensor.custom is not None)
    if customs:
        facts["encoders"] = "\n".join(f"{custom.type} = {custom}" for custom in customs)
    if imatrix is not None:
        facts["imatrix.sha256"] = imatrix.sha256
    feedback = () if draft.feedback is None else draft.feedback.fields()
    provenance.record_quantization(metadata, facts, imatrix, feedback)


def _copied_ftype(draft: Draft) -> int:
    """Return the file type of a copy, mapped to or from its interleaved counterpart if rows are repacked.

    With merged adapters it is that of llama-export-lora, F16.
    """
    if isinstance(draft.source, LoraSource):
        return preset_by_name("F16").ftype
    ftype = _source_ftype(draft)
    if draft.options.repack or draft.options.unrepack:
        return repacked_ftype(ftype, draft.options.repack)
    return ftype


def _source_ftype(draft: Draft) -> int:
    """Return the file type of a source; without the key, llama.cpp's guess: the most frequent type."""
    source, tensors = draft.source, {tensor.name: tensor for tensor in draft.groups.tensors}
    if draft.adds_output:
        del tensors[EXTRA_OUTPUT]
    file_type = source.get("general.file_type")
    if file_type is not None:
        if not isinstance(file_type, int):
            raise FormatError(
                f"{source.paths[0]}: general.file_type is {file_type!r}, not a number; correct it, or use a type other "
                "than COPY",
                "QK-E123",
            )
        return file_type
    types = Counter(tensors[name].type.name for name in (tensors if draft.as_ik else iteration_order(tensors)))
    ftype = 0
    with suppress(TypeNotSupported):
        ftype = preset_by_name(max(types, key=lambda name: types[name], default="F32")).ftype
    return ftype | FTYPE_UNKNOWN


def _facts(draft: Draft, request: Request) -> dict[str, str]:
    """Return the provenance: version, recipe and source."""
    return {
        "version": __version__,
        "recipe": "\n".join(_recipe(draft, request)),
        "source.name": draft.source.paths[0].name,
        "source.fingerprint": draft.fingerprint,
    }


def _recipe(draft: Draft, request: Request) -> Iterator[str]:
    """Yield the settings that determine the bytes, one per line: TYPE, options, rules; files without their folders."""
    options, default = draft.options, QuantizeOptions()
    yield draft.preset.name if options.like is None else f"--like {options.like.name}"
    for f in fields(QuantizeOptions):
        value = getattr(options, f.name)
        if f.name not in (*_SEPARATE_OPTIONS, "no_provenance") and value != getattr(default, f.name):
            for text in _texts(f.name, value):
                yield f"--{f.name.replace('_', '-')} {text}".strip()
    for rule in request.rules:
        yield f"{rule.pattern} = {rule.type}"


def _texts(name: str, value: object) -> list[str]:
    """Return the values of an option, one for each occurrence."""
    if value is True:
        return [""]
    if name == "override_kv" and isinstance(value, tuple):
        return [_override(text) for text in value]
    if name == "merge_lora" and isinstance(value, tuple):
        return [PurePath(text).name for text in value]
    if isinstance(value, tuple) and isinstance(value[0], int):
        return [",".join(map(str, value))]
    values = value if isinstance(value, tuple) else (value,)
    return [v.name if isinstance(v, Path) else str(v) for v in values]


def _override(text: str) -> str:
    path = override_file(text)
    shown_text = text if path is None else f"{text.partition('@')[0]}@{path.name}"
    return shorten(printable(shown_text), _WIDTH)
