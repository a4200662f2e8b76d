"""The plan of a quantization, made before its first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.formats.gguf import Field, open_model
from quantkit.formats.override import override_file
from quantkit.formats.remote import URL, locate
from quantkit.html_table import HtmlTable, Table
from quantkit.kernels.formats import SYMMETRIC
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline.choose import Choice, Request
from quantkit.pipeline.custom_encoder import custom_encoders
from quantkit.pipeline.exactness import grid_fields
from quantkit.pipeline.lora_source import LoraSource, merge_adapters, merge_notes
from quantkit.pipeline.plan import OutputTensor, Plan, plan_output
from quantkit.pipeline.reference_types import read_reference_types
from quantkit.pipeline.repack import bf16_r16_notes
from quantkit.pipeline.requantize import requantize_notes
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, run_plan
from quantkit.pipeline.runtimes import check_complete, is_known
from quantkit.pipeline.source import Source
from quantkit.quantize.choices import choose, lint, request_of
from quantkit.quantize.draft import Draft, shards_of, start, with_groups
from quantkit.quantize.grid import GridChoices, choose_grids, with_grids
from quantkit.quantize.inputs import (
    equalized_plain_names,
    with_covariances,
    with_feedback,
    with_imatrix,
    with_importance,
    with_names,
    without_equalization,
)
from quantkit.quantize.metadata import metadata_of
from quantkit.quantize.options import check_options, output_path, preset_of, room_of, size_of
from quantkit.quantize.tensor_scales import with_tensor_scales
from quantkit.types import TensorType
from quantkit.units import format_seconds
from quantkit.version import __version__

#: TYPEs that change no weight, with which an incomplete model is accepted.
_AS_IT_IS = frozenset({"COPY", "REPACK", "UNREPACK"})


def is_whole_model(source: Source) -> bool:
    """Return whether a file is a complete model for runtimes, with a vocabulary."""
    return source.get("tokenizer.ggml.model") is not None and source.get("general.type", "model") == "model"


@checked
def plan_quantize(
    source: str | Path,
    output: str | Path | None,
    type: str | TensorType,  # noqa: A002 - the word of the command line
    options: QuantizeOptions | None = None,
) -> Plan:
    """Plan a quantization without writing anything; arguments and errors as for ``quantize``."""
    type = str(type)  # noqa: A001
    options = options or QuantizeOptions()
    check_options(type, options)
    with open_model(source) as opened:
        plan = plan_from(opened, output_path(source, output, type, options), type, options)
    if not options.allow_incomplete and type not in _AS_IT_IS and is_whole_model(opened):
        check_complete({f.key: f for f in plan.fields}, plan.entries, str(source), extra=False)
    return plan


def plan_from(
    source: Source,
    output: Path,
    type: str,  # noqa: A002
    options: QuantizeOptions,
    *,
    reads: Sequence[Path] = (),
    identity: str = "",
) -> Plan:
    """Plan the quantization of an open source with checked options.

    ``reads`` are its files, if it does not list them itself, ``identity`` everything else that determines its bytes.
    """
    repack = options.repack or options.unrepack
    if repack and type not in ("REPACK", "UNREPACK"):
        preset_of(type, options)  # a typo, which would otherwise be the name of the output
    like = None if options.like is None else read_reference_types(options.like)
    preset = like.preset if like else preset_of("COPY" if repack else type, options)
    if options.merge_lora:
        source = merge_adapters(source, options.merge_lora)
    draft = start(source, preset, options, like)
    if isinstance(source, LoraSource):
        draft = draft.with_notes(merge_notes(source))
        reads = (*reads, *(adapter.path for adapter, _ in source.adapters))
    if like is not None:
        like.check(str(draft.key("general.architecture")))
    draft = with_imatrix(with_names(with_groups(with_feedback(draft))))
    if like is not None:
        draft = replace(draft, like=like.prune(draft.renamed))
    request = request_of(draft)
    draft, tensors, choices = choose(draft, request)
    while names := equalized_plain_names(draft, tensors, choices):
        draft, tensors, choices = choose(without_equalization(draft, source, names), request)
    grids = GridChoices(choices)
    if options.keep_grid:
        grids = choose_grids(draft.source, request, tensors, choices, only_whole=draft.feedback is not None)
    choices = grids.choices
    draft = draft.with_notes((*lint(draft, request, tensors, choices), *grids.notes))
    if draft.like is not None:
        draft = draft.with_notes(draft.like.notes([tensor.name for tensor in tensors]))
    typed_tensors, coverage = with_importance(draft, request, tensors, choices)
    outputs, feedback_notes = with_covariances(draft, with_grids(typed_tensors, grids.names))
    draft, (outputs, shards), scale_notes = with_tensor_scales(draft, outputs, shards_of(draft))
    metadata, metadata_notes = metadata_of(draft, request, outputs)
    texts = [path for path in map(override_file, options.override_kv) if path is not None]
    # Files that remain open during the run.
    imatrix = options.imatrix if draft.imatrix is None else draft.imatrix.path
    feedback = draft.feedback.provider.path if draft.feedback else None
    input_files = (imatrix, feedback, options.like, *options.calibrate, *texts)
    files = (*options.recipe, *options.tensor_type_file, *input_files, *reads)
    provider_id = draft.feedback.provider.identity if draft.feedback else ""
    imatrix_digest = draft.imatrix.sha256 if draft.imatrix else None
    plan = plan_output(
        draft.source,
        output,
        [*metadata.fields(), *_counted_fields(options, output, outputs)],
        outputs,
        title=_title(draft),
        rules=_rules(request),
        shard_of=shards,
        split_max_size=None if options.split_max_size is None else size_of(options.split_max_size),
        reads=[locate(p) for p in files if p is not None],
        all_dims=not is_known(str(draft.key("general.architecture"))),  # as image models have them
        identity=f"{__version__} {draft.fingerprint} {imatrix_digest}{provider_id}{identity}",
        big_endian=options.bigendian,
        reserve=room_of(options.reserve),
    )
    notes = (
        *draft.notes,
        *scale_notes,
        *coverage,
        *feedback_notes,
        *_notes(draft, request, choices, plan),
        *metadata_notes,
    )
    plan = replace(plan, notes=(*notes, *plan.notes))
    if draft.feedback is None:
        return plan
    plan = replace(
        plan,
        without_feedback=tuple(draft.feedback.without.items()),
        feedback_notes=tuple(feedback_notes),
    )
    return plan if draft.executor is None else replace(plan, executor=draft.executor)


def _counted_fields(options: QuantizeOptions, output: Path, tensors: Sequence[OutputTensor]) -> list[Field]:
    """Return the keys of what a run counts and writes at its end: not to a store, which has the header by then."""
    if options.no_provenance or options.bigendian or isinstance(output, URL):
        return []
    return grid_fields(t.name for t in tensors if t.keeps_grid and t.custom is None)


def _title(draft: Draft) -> str:
    if draft.options.repack:
        return "REPACK"
    return "UNREPACK" if draft.options.unrepack else draft.preset.name


def _rules(request: Request) -> str:
    """Return the tree whose rules chose the types; "" if none did."""
    if request.repack:
        return ""
    return "ik" if request.ik else "mainline"


def _notes(draft: Draft, request: Request, choices: Sequence[Choice], plan: Plan) -> list[str]:
    """Return notes about the chosen types, and about options without effect."""
    options, encodings = draft.options, [part.encoding for tensor in plan.tensors for part in tensor.parts]
    changed = [(encoding.source, encoding.target) for encoding in encodings]
    notes = [*requantize_notes(plan.source, plan.tensors)]
    notes += request.repack.notes(changed, (c.reason for c in choices)) if request.repack else []
    notes += bf16_r16_notes(changed)
    if options.encoder is not None and not any(encoding.is_unusual for encoding in encodings):
        notes.append(f"--encoder {options.encoder} is ignored: it is the default for these types")
    unused = custom_encoders(options.encoders).keys() - {custom.type.name for custom in plan.custom_encoders}
    notes += [f"encoders: no tensor is encoded as {name}" for name in sorted(unused)]
    if options.symmetric_q40 and not any(encoding.encoder == SYMMETRIC for encoding in encodings):
        notes.append("--symmetric-q40 is ignored: no tensor is encoded as Q4_0")
    return notes


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class QuantizeResult(HtmlTable):
    """The plan of an output and the result of its run."""

    plan: Plan
    run: RunResult
    threads: int

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.plan.shards)

    def as_table(self) -> Table:
        """Return the plan's table, with the file and the time in its caption."""
        table = self.plan.as_table()
        return table._replace(caption=f"{self.paths[0].name}, {table.caption}, {format_seconds(self.run.seconds)}")


@checked
def quantize(
    source: str | Path,
    output: str | Path | None,
    type: str | TensorType,  # noqa: A002 - the word of the command line
    options: QuantizeOptions | None = None,
    *,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Quantize ``source`` to ``output``.

    Args:
        source: a GGUF file, or any shard of a split model.
        output: the file to write; None for ggml-model-TYPE.gguf beside the source, as llama-quantize.
        type: a preset, its number, or a tensor type, in any case; with ``options.repack`` or ``unrepack`` only a name
            for the output, such as "REPACK" or "UNREPACK"; with ``options.like`` "LIKE".
        options: all other settings of the output.
        max_ram: limit of the workers' buffers together, in bytes (or "2G").
        run: threads, resume, overwrite, measure_error, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; no output has its final name then.
    """
    return run_quantize(plan_quantize(source, output, type, options), max_ram=max_ram, **run)


@checked
def run_quantize(plan: Plan, *, max_ram: int | str = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]) -> QuantizeResult:
    """Carry out a plan of ``plan_quantize``; arguments and errors as for ``quantize``."""
    requested = run.get("threads") or 0
    threads = requested if requested > 0 else available_cpus()
    run["threads"] = threads if run.get("ray") is None else requested
    result = run_plan(plan, max_ram=size_of(max_ram), **run)
    return QuantizeResult(plan, result, sum(node.cpus for node in result.nodes) or threads)
