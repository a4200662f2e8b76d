"""What is known of the inputs of every tensor that is encoded: importance, covariances; and its encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quantkit.calibration.heldout import held_out_used
from quantkit.errors import RecipeError
from quantkit.formats.imatrix import read_imatrix
from quantkit.kernels.formats import SYMMETRIC, encoder_for, has_encoder
from quantkit.pipeline.choose import Choice, Request
from quantkit.pipeline.feedback import Feedback, Recorded
from quantkit.pipeline.importance import Found, Importance, check_importance
from quantkit.pipeline.metadata import prune_names
from quantkit.pipeline.plan import Chosen
from quantkit.pipeline.planned import fed, whole
from quantkit.pipeline.run import Executor
from quantkit.pipeline.source import Source
from quantkit.pipeline.threads import Threads
from quantkit.quantize.draft import Draft
from quantkit.quantize.options import QuantizeOptions
from quantkit.types import TensorType


def load_importance(draft: Draft) -> None:
    options = draft.options
    # Under both names, because layers may turn out to be left as they are.
    names = dict.fromkeys([*draft.source.tensors, *(tensor.name for tensor in draft.taken.tensors)])
    draft.renamed = prune_names(names, options.prune_layers)
    if options.imatrix is None:
        if options.include_weights or options.exclude_weights:
            raise RecipeError(
                "--include-weights and --exclude-weights choose entries of an --imatrix, but none was given"
            )
        return
    draft.imatrix = read_imatrix(options.imatrix)
    warning = held_out_used(draft.imatrix.path, draft.imatrix.extra)
    draft.notes += [] if warning is None else [warning]
    draft.importance = Importance(
        draft.imatrix,
        include=options.include_weights,
        exclude=options.exclude_weights,
        original_names=draft.original_names(),
    )


def with_importance(
    draft: Draft, request: Request, tensors: Sequence[Chosen], choices: Sequence[Choice]
) -> list[Chosen]:
    """Look up the importance of every tensor that is encoded, and refuse those that may not go without."""
    chosen, finds = [], []
    original = draft.original_names()
    for tensor, choice in zip(tensors, choices, strict=True):
        found = None
        made = not choice.copied and not choice.repacked
        if draft.importance is not None and choice.type.is_quantized and made:
            found = draft.importance.lookup(tensor.name, tensor.shape)
            if draft.feedback is not None:
                found = replace(found, factors=draft.feedback.known.factors(original.get(tensor.name, tensor.name)))
            finds.append(found)
        shown = draft.feedback is not None and draft.feedback.shows(original.get(tensor.name, tensor.name))
        if made and has_encoder(choice.type) and not shown:  # a run refuses types without an encoder as such
            check_importance(
                found,
                tensor.name,
                choice.type,
                preset=draft.preset.name,
                ik=request.ik,
                ignore_rules=draft.options.ignore_imatrix_rules,
            )
        used = found if found is not None and found.entry is not None else None
        chosen.append(_decided(tensor, choice, used, draft.options))
    if draft.importance is not None and finds:
        coverage = draft.importance.coverage([t.name for t in draft.taken.tensors], finds)
        coverage.check()
        draft.notes += coverage.lines()
    return chosen


def feedback_of(
    source: Source, options: QuantizeOptions
) -> tuple[Feedback | None, Callable[[Threads], Executor] | None, Source]:
    """Return what says which inputs tensors have, by a file of covariances or by running a text; what runs it; and
    the source as it is to be read."""
    if not options.calibrate:
        return None if options.feedback is None else Feedback(Recorded(options.feedback)), None, source
    from quantkit.sequential import Calibration, Foreseen

    text = Calibration(
        options.calibrate, options.calibrate_ctx, options.calibrate_chunks, options.balance, options.refit_norms
    )
    known = Foreseen(source.paths[0], text)
    return Feedback(known), known.executor, known.source(source)


def spares_plain(draft: Draft, source: Source, tensors: Sequence[Chosen], choices: Sequence[Choice]) -> bool:
    """Balance no tensor that keeps its bytes or becomes plain floats. Return whether one was to be balanced."""
    if draft.feedback is None:
        return False
    known = draft.feedback.known
    plain = [t for t, c in zip(tensors, choices, strict=True) if not c.type.is_quantized]
    names = {part.source.name for t in plain for part in t.parts if known.widens(part.source.name)}
    if names:
        draft.source = known.source(source, names)
    return bool(names)


def with_feedback(draft: Draft, chosen: Sequence[Chosen]) -> list[Chosen]:
    """Look up the covariance of every tensor that is encoded, if there are any."""
    if draft.feedback is None:
        return list(chosen)
    original = draft.original_names()
    made = []
    for c in chosen:
        inputs = refit = None
        changed = ""
        name = original.get(c.name, c.name)
        if c.encoder:
            inputs = draft.feedback.lookup(c.name, name, c.shape, c.type)
        elif c.is_whole and c.parts[0].source.type is c.type:
            inputs = draft.feedback.corrected(c.name, name, c.shape, c.type)
            refit = draft.feedback.refit(c.name, name, c.type)
            changed = "; refit" if refit is not None else "; corrected" if inputs is not None else ""
        parts = (part if inputs is None else fed(part, inputs) for part in c.parts)
        made.append(replace(c, reason=c.reason + changed, parts=tuple(replace(part, refit=refit) for part in parts)))
    draft.notes += draft.feedback.notes()
    return made


_WHOSE = {
    "ik": "; encoded as in ik_llama.cpp",
    "mainline": "; encoded as in llama.cpp",
    SYMMETRIC: "; levels -7 .. 7",
}


def _decided(tensor: Chosen, choice: Choice, found: Found | None, options: QuantizeOptions) -> Chosen:
    """Return a tensor with its type, its reason, its encoder and the importance of each of its parts."""
    parts = tuple(whole(p.source, found) if p.is_whole else replace(p, found=found) for p in tensor.parts)
    reason = choice.reason if tensor.is_whole else f"{tensor.reason}; {choice.reason}"
    whose = "" if choice.copied or choice.repacked else _encoder(choice.type, options)
    if other_encoder(choice.type, whose):
        reason += _WHOSE[whose]
    return replace(
        tensor, type=choice.type, reason=reason, parts=parts, fallback_from=choice.fallback_from, encoder=whose
    )


def other_encoder(t: TensorType, whose: str) -> bool:
    """Tell whether a tensor is encoded by another search than is usual for its type."""
    return whose not in ("", encoder_for(t))


def _encoder(t: TensorType, options: QuantizeOptions) -> str:
    """Return which encoder of a type is asked for."""
    if options.symmetric_q40 and t.name == "Q4_0":  # in ik_llama.cpp, interleaved types do not heed it
        return SYMMETRIC
    return encoder_for(t, options.encoder)
