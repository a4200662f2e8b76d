"""Inputs of every encoded tensor: importance, covariances; and its encoder."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from quantkit.calibration.heldout import held_out_warning
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.imatrix import read_imatrix
from quantkit.kernels.formats import SYMMETRIC, encoder_for, has_encoder
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline.choose import Choice, Request
from quantkit.pipeline.custom_encoder import custom_encoders
from quantkit.pipeline.facts import layer_of
from quantkit.pipeline.feedback import CovarianceFile, Feedback
from quantkit.pipeline.importance import NO_MATRIX, Importance, RowImportance, check_importance
from quantkit.pipeline.metadata import prune_names
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.row_slices import whole_tensor, with_inputs
from quantkit.pipeline.source import Source
from quantkit.quantize.draft import Draft, with_groups
from quantkit.types import TensorType


def with_names(draft: Draft) -> Draft:
    """Return the draft with the names of the output's tensors."""
    # Under both names, because some layers may not be merged.
    names = dict.fromkeys([*draft.source.tensors, *(tensor.name for tensor in draft.groups.tensors)])
    return replace(draft, renamed=prune_names(names, draft.options.prune_layers))


def with_imatrix(draft: Draft) -> Draft:
    """Return the draft with the importance matrix, if there is one."""
    options = draft.options
    if options.imatrix is None:
        if options.include_weights or options.exclude_weights:
            raise RecipeError(
                "--include-weights and --exclude-weights select entries of an importance matrix: give --imatrix",
                "QK-E202",
            )
        return draft
    if draft.is_mmproj:
        raise FormatError(f"{draft.source.paths[0]}: {NO_MATRIX}; omit --imatrix", "QK-E119")
    imatrix = read_imatrix(options.imatrix, check=False)
    warning = held_out_warning(imatrix.path, imatrix.extra)
    importance = Importance(
        imatrix,
        include=options.include_weights,
        exclude=options.exclude_weights,
        original_names=draft.original_names(),
    )
    return replace(draft, imatrix=imatrix, importance=importance).with_notes([] if warning is None else [warning])


def with_importance(
    draft: Draft, request: Request, tensors: Sequence[OutputTensor], choices: Sequence[Choice]
) -> tuple[list[OutputTensor], list[str]]:
    """Look up the importance of every encoded tensor; refuse types that need it where it is missing.

    Returns the tensors with their types, and notes on entries that are used, missing or not needed.
    """
    result, lookups = [], []
    original, first_nextn = draft.original_names(), draft.first_nextn_layer
    for tensor, choice in zip(tensors, choices, strict=True):
        importance = None
        source_name = original.get(tensor.name, tensor.name)
        is_encoded = not choice.copied and not choice.repacked
        if draft.importance is not None and choice.type.is_quantized and is_encoded:
            importance = draft.importance.lookup(tensor.name, tensor.shape)
            if draft.feedback is not None:
                importance = replace(importance, factors=draft.feedback.provider.factors(source_name))
            lookups.append(importance)
        has_importance = draft.feedback is not None and draft.feedback.has_importance(source_name)
        # The run itself rejects types without an encoder.
        if is_encoded and has_encoder(choice.type) and not has_importance:
            check_importance(
                importance,
                tensor.name,
                choice.type,
                preset=draft.preset.name,
                ik=request.ik,
                ignore_rules=draft.options.ignore_imatrix_rules,
                predicts=first_nextn <= layer_of(source_name),
                mmproj=draft.is_mmproj,
            )
        used = importance if importance is not None and importance.entry is not None else None
        result.append(_with_choice(tensor, choice, used, draft.options))
    if draft.is_mmproj and any(tensor.encoder and tensor.type.is_quantized for tensor in result):
        return result, [NO_MATRIX]
    if draft.importance is None or not lookups:
        return result, []
    coverage = draft.importance.coverage([t.name for t in draft.groups.tensors], lookups)
    coverage.check()
    return result, coverage.lines()


def with_feedback(draft: Draft) -> Draft:
    """Return the draft with error feedback from a file of covariances, or from a calibration run and with its executor
    and its equalized source.
    """
    options = draft.options
    if not options.calibrate:
        if options.feedback is None:
            return draft
        return replace(draft, feedback=Feedback(CovarianceFile(options.feedback)))
    from quantkit.sequential import Calibration, CalibrationInputs

    text = Calibration(options.calibrate, options.calibrate_ctx, options.calibrate_chunks, options.balance)
    provider = CalibrationInputs(draft.source.paths[0], text)
    source = provider.source(draft.source)
    return replace(draft, feedback=Feedback(provider), executor=provider.executor, source=source)


def equalized_plain_names(draft: Draft, tensors: Sequence[OutputTensor], choices: Sequence[Choice]) -> set[str]:
    """Return the names of equalized source tensors that are copied or become plain floats."""
    if draft.feedback is None:
        return set()
    provider = draft.feedback.provider
    plain = [t for t, c in zip(tensors, choices, strict=True) if not c.type.is_quantized]
    return {part.source.name for t in plain for part in t.parts if provider.widens(part.source.name)}


def without_equalization(draft: Draft, source: Source, names: Set[str]) -> Draft:
    """Return the draft of a source with the tensors ``names`` as they are stored."""
    assert draft.feedback is not None
    return with_groups(replace(draft, source=draft.feedback.provider.source(source, names)))


def with_covariances(draft: Draft, tensors: Sequence[OutputTensor]) -> tuple[list[OutputTensor], list[str]]:
    """Look up the covariance of every encoded tensor, if there is error feedback; also return notes on it."""
    if draft.feedback is None:
        return list(tensors), []
    original = draft.original_names()
    result = []
    for c in tensors:
        inputs, changed = None, ""
        name = original.get(c.name, c.name)
        if c.keeps_grid:
            changed = "; without feedback"
        elif c.encoder:
            inputs = draft.feedback.lookup(c.name, name, c.shape, c.type)
        elif c.is_whole and c.parts[0].source.type is c.type:
            inputs = draft.feedback.lookup_corrected(c.name, name, c.shape, c.type)
            changed = "; corrected" if inputs is not None else ""
        parts = tuple(part if inputs is None else with_inputs(part, inputs) for part in c.parts)
        result.append(replace(c, reason=c.reason + changed, parts=parts))
    return result, draft.feedback.notes()


_ENCODER_NOTES = {
    "ik": "; encoded as in ik_llama.cpp",
    "mainline": "; encoded as in llama.cpp",
    SYMMETRIC: "; levels -7 .. 7",
}


def _with_choice(
    tensor: OutputTensor, choice: Choice, importance: RowImportance | None, options: QuantizeOptions
) -> OutputTensor:
    """Return a tensor with its type, its reason, its encoder and the importance of each of its parts."""
    parts = tuple(
        whole_tensor(p.source, importance) if p.is_whole else replace(p, importance=importance) for p in tensor.parts
    )
    reason = choice.reason_text if tensor.is_whole else f"{tensor.reason}; {choice.reason_text}"
    encoder = "" if choice.copied or choice.repacked else _encoder(choice.type, options)
    if encoder not in ("", encoder_for(choice.type)):
        reason += _ENCODER_NOTES[encoder]
    custom = custom_encoders(options.encoders).get(choice.type.name) if encoder else None
    return replace(
        tensor,
        type=choice.type,
        reason=reason if custom is None else f"{reason}; encoded by {custom}",
        parts=parts,
        fallback_from=choice.fallback_from,
        encoder=encoder,
        custom=custom,
    )


def _encoder(t: TensorType, options: QuantizeOptions) -> str:
    """Return the encoder of a type that the options select."""
    if options.symmetric_q40 and t.name == "Q4_0":  # ik_llama.cpp's interleaved types ignore it
        return SYMMETRIC
    return encoder_for(t, options.encoder)
