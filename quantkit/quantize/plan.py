"""Everything about a quantization, decided before its first byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantkit.formats.gguf import open_model
from quantkit.formats.remote import located
from quantkit.kernels.formats import SYMMETRIC
from quantkit.pipeline.choose import Request
from quantkit.pipeline.like import read_like
from quantkit.pipeline.plan import Chosen, Plan, plan_output
from quantkit.pipeline.repack import bf16_r16_notes
from quantkit.pipeline.requantize import requantize_notes
from quantkit.pipeline.source import Source
from quantkit.quantize.choices import choose, lint, request_of
from quantkit.quantize.draft import Draft, check_source
from quantkit.quantize.inputs import (
    feedback_of,
    load_importance,
    other_encoder,
    spares_plain,
    with_feedback,
    with_importance,
)
from quantkit.quantize.metadata import metadata_of
from quantkit.quantize.options import QuantizeOptions, check_options, output_path, preset_of, size_of
from quantkit.quantize.taken import shards_of, taken_up
from quantkit.version import __version__


def plan_quantize(
    source: str | Path,
    output: str | Path | None,
    type: str,  # noqa: A002 - the word of the command line
    options: QuantizeOptions | None = None,
) -> Plan:
    """Decide everything about a quantization and write nothing; arguments and errors as for ``quantize``."""
    options = options or QuantizeOptions()
    check_options(type, options)
    with open_model(source) as opened:
        return plan_from(opened, output_path(source, output, type, options), type, options)


def plan_from(
    source: Source,
    output: Path,
    type: str,  # noqa: A002
    options: QuantizeOptions,
    *,
    reads: Sequence[Path] = (),
    identity: str = "",
) -> Plan:
    """Plan the quantization of a source that is open, with options that are checked.

    ``reads`` are its files, where it does not name them, ``identity`` what else decides its bytes.
    """
    repack = options.repack or options.unrepack
    if repack and type not in ("REPACK", "UNREPACK"):
        preset_of(type, options)  # a typing error, which would only be the name of the output
    like = None if options.like is None else read_like(options.like)
    draft = Draft(source, like.preset if like else preset_of("COPY" if repack else type, options), options, like=like)
    check_source(draft)
    if like is not None:
        like.check(str(draft.key("general.architecture")))
    draft.feedback, draft.executor, draft.source = feedback_of(source, options)
    draft.taken = taken_up(draft)
    load_importance(draft)
    draft.like = None if like is None else like.pruned(draft.renamed)
    request = request_of(draft)
    tensors, choices = choose(draft, request)
    while spares_plain(draft, source, tensors, choices):
        draft.taken = taken_up(draft)
        tensors, choices = choose(draft, request)
    lint(draft, request, tensors, choices)
    if draft.like is not None:
        draft.notes += draft.like.notes([tensor.name for tensor in tensors])
    chosen = with_feedback(draft, with_importance(draft, request, tensors, choices))
    draft.notes += _notes(draft, request, chosen)
    given = (options.imatrix, options.feedback, options.like, *options.calibrate)
    files = (*options.recipe, *options.tensor_type_file, *given, *reads)
    seen = draft.feedback.known.identity if draft.feedback else ""
    plan = plan_output(
        draft.source,
        output,
        metadata_of(draft, request).fields(),
        chosen,
        title="REPACK" if options.repack else "UNREPACK" if options.unrepack else draft.preset.name,
        rules="" if request.repack else "ik" if request.ik else "mainline",
        notes=draft.notes,
        shard_of=shards_of(draft),
        split_max_size=None if options.split_max_size is None else size_of(options.split_max_size),
        reads=[located(p) for p in files if p is not None],
        identity=f"{__version__} {draft.fingerprint} {draft.imatrix.sha256 if draft.imatrix else None}{seen}{identity}",
    )
    if draft.feedback is None:
        return plan
    plan = replace(plan, without_feedback=tuple(draft.feedback.without.items()))
    return plan if draft.executor is None else replace(plan, executor=draft.executor)


def _notes(draft: Draft, request: Request, chosen: Sequence[Chosen]) -> list[str]:
    """Return what is to be known about types as they are chosen, and options that change nothing."""
    options, changed = draft.options, [(part.source.type, c.type) for c in chosen for part in c.parts]
    notes = [*requantize_notes(draft.source, chosen)]
    notes += request.repack.notes(changed, [c.reason for c in chosen]) if request.repack else []
    notes += bf16_r16_notes(changed)
    if options.encoder is not None and not any(other_encoder(c.type, c.encoder) for c in chosen):
        notes.append(f"--encoder {options.encoder} changes nothing: types are encoded like that without it")
    if options.symmetric_q40 and not any(c.encoder == SYMMETRIC for c in chosen):
        notes.append("--symmetric-q40 changes nothing: no tensor is encoded as Q4_0")
    return notes
