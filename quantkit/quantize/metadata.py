"""The metadata of the output, in llama-quantize's order of events, and what it says of its making."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import fields

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import Field
from quantkit.pipeline.choose import Request, iteration_order
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.pipeline.metadata import (
    Metadata,
    imatrix_fields,
    prune_metadata,
    set_calibration,
    set_feedback,
    set_provenance,
    set_quantization,
)
from quantkit.pipeline.presets import FTYPE_UNKNOWN, preset_by_name, repacked_ftype
from quantkit.pipeline.regroup import prune_record
from quantkit.quantize.draft import Draft
from quantkit.quantize.options import QuantizeOptions
from quantkit.version import __version__


def metadata_of(draft: Draft, request: Request) -> Metadata:
    """Edit the source's metadata in llama-quantize's order of events."""
    source, options = draft.source, draft.options
    metadata = Metadata(draft.taken.metadata.fields(), ik=draft.as_ik)
    ftype = _copied_ftype(draft) if request.copy else draft.preset.ftype
    more: list[Field] = []
    if draft.imatrix is not None and draft.importance is not None and (n := draft.importance.n_entries):
        more = imatrix_fields(draft.imatrix, str(draft.imatrix.path), n, hide=options.hide_imatrix, ik=draft.as_ik)
    set_quantization(metadata, ftype, draft.overrides.values(), more)
    if options.prune_layers:
        draft.notes += prune_metadata(metadata, str(source.get("general.architecture")), options.prune_layers)
        prune_record(metadata, options.prune_layers)
    if not options.no_provenance:
        set_calibration(metadata, None if options.hide_imatrix else draft.imatrix)
        set_provenance(metadata, _provenance(draft, request))
        set_feedback(metadata, () if draft.feedback is None else draft.feedback.fields())
    return metadata


def _copied_ftype(draft: Draft) -> int:
    """Return the file type of a copy; that of ik's interleaved preset, or from it, if rows are repacked."""
    ftype = _source_ftype(draft)
    if draft.options.repack or draft.options.unrepack:
        return repacked_ftype(ftype, draft.options.repack)
    return ftype


def _source_ftype(draft: Draft) -> int:
    """Return the file type of a source; of one that does not say, llama.cpp's guess: the type of most tensors."""
    source, tensors = draft.source, {tensor.name: tensor for tensor in draft.taken.tensors}
    if draft.adds_output:
        del tensors[EXTRA_OUTPUT]
    said = source.get("general.file_type")
    if said is not None:
        if not isinstance(said, int):
            raise FormatError(
                f"{source.paths[0]}: general.file_type is {said!r}, not a number; correct it, or do not COPY"
            )
        return said
    types = Counter(tensors[name].type.name for name in (tensors if draft.as_ik else iteration_order(tensors)))
    ftype = 0
    with suppress(TypeNotSupported):
        ftype = preset_by_name(max(types, key=lambda name: types[name], default="F32")).ftype
    return ftype | FTYPE_UNKNOWN


def _provenance(draft: Draft, request: Request) -> dict[str, str]:
    """Return what a reader of the file should know about its making."""
    options = draft.options
    apart = (
        "imatrix",
        "feedback",
        "like",
        "ready_rules",
        "recipe",
        "tensor_type",
        "tensor_type_file",
        "custom_q",
        "no_provenance",
    )
    default = QuantizeOptions()
    given = [
        f"--{f.name.replace('_', '-')} {_shown(getattr(options, f.name))}".strip()
        for f in fields(QuantizeOptions)
        if f.name not in apart and getattr(options, f.name) != getattr(default, f.name)
    ]
    first = draft.preset.name if options.like is None else f"--like {options.like.name}"
    lines = [first, *given, *(f"{rule.pattern} = {rule.type}" for rule in request.rules)]
    facts = {
        "version": __version__,
        "recipe": "\n".join(lines),
        "source.name": draft.source.paths[0].name,
        "source.fingerprint": draft.fingerprint,
    }
    if draft.imatrix is not None and not options.hide_imatrix:
        facts["imatrix.sha256"] = draft.imatrix.sha256
    return facts


def _shown(value: object) -> str:
    if value is True:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
