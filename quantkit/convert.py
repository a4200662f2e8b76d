"""Convert a checkpoint of Hugging Face: ``quantkit convert``, convert_hf_to_gguf.py and llama-quantize in one pass.

plan_convert(...)   ->  Plan    every type, offset and byte count, from headers alone, nothing written
convert(...)        ->  QuantizeResult    carry out the plan
plan_mmproj(...), convert_mmproj(...)    the same of the vision and audio encoders
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from quantkit.arguments import changed_options, checked
from quantkit.checkpoint import Checkpoint, OpenOptions, open_checkpoint
from quantkit.checkpoint.fusions import FUSIONS
from quantkit.checkpoint.general import fill_template
from quantkit.checkpoint.nextn import ONLY, WITH, WITHOUT
from quantkit.checkpoint.open_mmproj import open_mmproj
from quantkit.checkpoint.optional_tensors import absent_tensors
from quantkit.checkpoint.policy import OUTTYPE_NAMES
from quantkit.checkpoint.registry import ARCHITECTURES, MMPROJ
from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.formats.gguf import TensorInfo
from quantkit.formats.lora import parse_adapter
from quantkit.formats.outputs import resolve_links
from quantkit.formats.remote import locate
from quantkit.kernels.formats import encoder_for
from quantkit.options.convert import INTERMEDIATES
from quantkit.options.convert import ConvertOptions as ConvertOptions
from quantkit.pipeline.expert_lists import prune_source, read_experts
from quantkit.pipeline.plan import OutputTensor, Plan, plan_output
from quantkit.pipeline.recipe import Rule
from quantkit.pipeline.row_slices import whole_tensor
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions
from quantkit.pipeline.runtimes import check_complete, encoder_notes
from quantkit.pipeline.source import Source
from quantkit.quantize import (
    QuantizeOptions,
    QuantizeResult,
    check_options,
    plan_from,
    room_of,
    run_quantize,
    size_of,
    title_of,
)
from quantkit.types import TensorType
from quantkit.unsupported_settings import unsupported_settings
from quantkit.version import __version__

#: The note on a text model whose checkpoint has encoders.
ENCODERS_NOTE = "the vision and audio encoders are not in this file: --mmproj writes them to a file of their own"
#: Options without meaning if the output is quantized.
_WITHOUT_TYPE = (
    "outtype",
    "fp8_as_q8",
    "vocab_only",
    "split_max_tensors",
    "no_tensor_first_split",
    "split_max_size",
)


@checked
def convert(
    folder: str | Path,
    output: str | Path | None = None,
    type: str | TensorType | None = None,  # noqa: A002 - the word of the command line
    options: ConvertOptions | None = None,
    quantize: QuantizeOptions | None = None,
    *,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Convert the checkpoint in ``folder``; with a type, quantize it in the same pass.

    Args:
        folder: config.json, model*.safetensors, the files of the tokenizer.
        output: the file to write, with {ftype} in its name replaced by the type, or a directory; None for the default
            name of convert_hf_to_gguf.py, in ``folder``.
        type: as for ``quantize``, "LIKE" with ``quantize.like``; None for a conversion to ``options.outtype``.
        options: all other settings of the conversion.
        quantize: options of ``quantize``, with a type.
        max_ram: limit of the workers' buffers together, in bytes (or "2G").
        run: threads, resume, overwrite, measure_error, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; no output has its final name then.
    """
    return run_quantize(plan_convert(folder, output, type, options, quantize), max_ram=max_ram, **run)


@checked
def plan_convert(
    folder: str | Path,
    output: str | Path | None = None,
    type: str | TensorType | None = None,  # noqa: A002
    options: ConvertOptions | None = None,
    quantize: QuantizeOptions | None = None,
) -> Plan:
    """Plan a conversion without writing anything; arguments and errors as for ``convert``."""
    options = options or ConvertOptions()
    type = None if type is None else str(type)  # noqa: A001
    _check(options, type, quantize)
    if type is not None:
        quantize_options = quantize or QuantizeOptions()
        check_options(type, quantize_options)
        opened = _open(folder, options, options.intermediate)
        quantize_options = replace(
            quantize_options,
            bigendian=options.bigendian or quantize_options.bigendian,
            reserve=quantize_options.reserve if options.reserve is None else options.reserve,
        )
        path = _output_path(opened, output, title_of(type, quantize_options))
        identity, reads = f" intermediate {options.intermediate}", _files(opened, options)
        if options.lossless:
            quantize_options = replace(
                quantize_options, ready_rules=(*quantize_options.ready_rules, *_lossless_rules(opened))
            )
        try:
            plan = plan_from(_prune(opened, options), path, type, quantize_options, reads=reads, identity=identity)
        except TypeNotSupported as e:
            if e.code != "QK-E209":
                raise
            raise e.extend("; --lossless keeps them unchanged") from None
        return _check_complete(replace(plan, notes=(*opened.notes, *plan.notes)), opened, options)
    return plan_opened(_open(folder, options, options.outtype), output, options)


@checked
def convert_mmproj(
    folder: str | Path,
    output: str | Path | None = None,
    type: str | TensorType | None = None,  # noqa: A002
    options: ConvertOptions | None = None,
    *,
    no_provenance: bool = False,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Convert the vision and audio encoders of the checkpoint in ``folder`` to an mmproj file.

    Args:
        folder: config.json, model*.safetensors, preprocessor_config.json or processor_config.json.
        output: the file to write, with {ftype} in its name replaced by the type, or a directory; None for the default
            name of convert_hf_to_gguf.py, in ``folder``.
        type: of the matrices: f32, f16, bf16, q8_0 and auto as convert_hf_to_gguf.py --mmproj --outtype has them, all
            others as llama-quantize makes of its file; None for ``options.outtype``. The types of some tensors are
            fixed.
        options: model_name, metadata, merge_lora, allow_incomplete and bigendian; the others are for text models.
        no_provenance: of a type of llama-quantize, omit the keys that record how the file was made.
        max_ram: limit of the workers' buffers together, in bytes (or "2G").
        run: threads, resume, overwrite, measure_error, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; no output has its final name then.
    """
    plan = plan_mmproj(folder, output, type, options, no_provenance=no_provenance)
    return run_quantize(plan, max_ram=max_ram, **run)


@checked
def plan_mmproj(
    folder: str | Path,
    output: str | Path | None = None,
    type: str | TensorType | None = None,  # noqa: A002
    options: ConvertOptions | None = None,
    *,
    no_provenance: bool = False,
) -> Plan:
    """Plan an mmproj file without writing anything; arguments and errors as for ``convert_mmproj``."""
    options = options or ConvertOptions()
    name = options.outtype if type is None else str(type)
    outtype = name.lower() if name.lower() in OUTTYPE_NAMES else options.intermediate
    opened = open_mmproj(
        folder,
        OpenOptions(
            outtype="auto" if outtype == "none" else outtype,
            exact=outtype in ("none", "q8_0", "tq1_0", "tq2_0"),
            model_name=options.model_name,
            metadata=options.metadata,
            allow_incomplete=options.allow_incomplete,
            adapters=[parse_adapter(str(adapter)) for adapter in options.merge_lora],
            mistral_format=options.mistral_format,
            base=options.base,
        ),
    )
    _note_losses(opened, opened.omissions, options)
    if outtype == name.lower():
        return plan_opened(opened, output, options)
    quantize_options = QuantizeOptions(
        bigendian=options.bigendian, reserve=options.reserve, no_provenance=no_provenance
    )
    check_options(name, quantize_options)
    path = _output_path(opened, output, title_of(name, quantize_options))
    identity = f" intermediate {options.intermediate}"
    plan = plan_from(opened, path, name, quantize_options, reads=opened.files, identity=identity)
    return _check_complete(replace(plan, notes=(*opened.notes, *plan.notes)), opened, options)


def plan_opened(opened: Checkpoint, output: str | Path | None, options: ConvertOptions) -> Plan:
    """Plan a conversion without a type, with tensors as the checkpoint is opened; ``options`` set the split."""
    source = _prune(opened, options)
    outputs = [_output_tensor(opened, tensor) for tensor in source.tensors.values()]
    plan = plan_output(
        source,
        _output_path(opened, output, opened.outtype.name),
        list(source.fields.values()),
        outputs,
        title=opened.outtype.name,
        notes=opened.notes,
        shard_of=_shards(outputs, options),
        identity=f"{__version__} convert {source.fingerprint()}",
        reads=_files(opened, options),
        all_dims=True,
        empty_first=options.no_tensor_first_split,
        pad_header=not options.vocab_only,
        big_endian=options.bigendian,
        reserve=room_of(options.reserve),
    )
    return _check_complete(plan, opened, options)


def _check_complete(plan: Plan, opened: Checkpoint, options: ConvertOptions) -> Plan:
    """Return a plan of a whole model, or of a requested part. Raises FormatError for an incomplete model."""
    fields = {f.key: f for f in plan.fields}
    if not options.allow_incomplete and opened.kind in ("", "mmproj"):
        check_complete(fields, plan.entries, str(opened.paths[0]))
    notes = encoder_notes(fields, plan.entries) if opened.kind == "mmproj" else []
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def architectures() -> dict[str, str]:
    """Return the supported model classes, with the GGUF architecture of each."""
    return {name: row.arch for name, row in sorted(ARCHITECTURES.items())}


def encoder_classes() -> dict[str, tuple[str, ...]]:
    """Return the model classes whose encoders are converted, with the projector types of their mmproj files."""
    return {name: row.projectors for name, row in sorted(MMPROJ.items())}


def _check(options: ConvertOptions, type: str | None, quantize: QuantizeOptions | None) -> None:  # noqa: A002
    """Refuse options that do not apply to this form of the command."""
    default = ConvertOptions()
    if options.outtype not in OUTTYPE_NAMES:
        raise RecipeError(f"--outtype {options.outtype}: choose one of {', '.join(OUTTYPE_NAMES)}", "QK-E203")
    if options.intermediate not in INTERMEDIATES:
        raise RecipeError(f"--intermediate {options.intermediate}: choose one of {', '.join(INTERMEDIATES)}", "QK-E203")
    if options.vocab_only and options.merge_lora:
        raise RecipeError("--merge-lora changes weights, and --vocab-only has none: omit one of them", "QK-E201")
    parts = [f"--{name}" for name in ("mtp", "no-nextn", "dspark") if getattr(options, name.replace("-", "_"))]
    if len(parts) > 1:
        raise RecipeError(f"{' and '.join(parts)} are mutually exclusive: run twice for two files", "QK-E201")
    if type is None:
        if options.intermediate != default.intermediate:
            raise RecipeError(
                "--intermediate is the type that tensors have before they are quantized: give a TYPE, or omit it",
                "QK-E202",
            )
        if quantize is not None and (names := changed_options(quantize)):
            raise RecipeError(
                f"{', '.join('--' + name.replace('_', '-') for name in names)}: options of quantize need a TYPE to "
                "quantize to: quantkit convert DIR OUT.gguf Q4_K_M",
                "QK-E202",
            )
        return
    for name in _WITHOUT_TYPE:
        if getattr(options, name) != getattr(default, name):
            raise RecipeError(
                f"--{name.replace('_', '-')} applies only to a conversion without TYPE: omit one of them", "QK-E201"
            )
    if quantize is not None and (quantize.keep_split or quantize.repack or quantize.unrepack):
        raise RecipeError(
            "--keep-split, --repack and --unrepack apply to GGUF files only, not to checkpoints", "QK-E201"
        )


def _open(folder: str | Path, options: ConvertOptions, outtype: str) -> Checkpoint:
    exact = outtype in ("none", "q8_0", "tq1_0", "tq2_0")
    nextn = WITH
    if options.mtp:
        nextn = ONLY
    elif options.no_nextn:
        nextn = WITHOUT
    open_options = OpenOptions(
        outtype="auto" if outtype == "none" else outtype,
        exact=exact,
        pre=options.pre,
        allow_other_ids=options.allow_other_ids,
        allow_incomplete=options.allow_incomplete,
        model_name=options.model_name,
        metadata=options.metadata,
        nextn=nextn,
        target_model_dir=options.target_model_dir,
        base=options.base,
        dspark=options.dspark,
        fuse=[f.option for f in FUSIONS if getattr(options, f.option[2:].replace("-", "_"))],
        fp8_as_q8=options.fp8_as_q8,
        vocab_only=options.vocab_only,
        lossless=options.lossless,
        dense_modules=options.sentence_transformers_dense_modules,
        mistral_format=options.mistral_format,
        disable_mistral_community_chat_template=options.disable_mistral_community_chat_template,
        adapters=[parse_adapter(str(adapter)) for adapter in options.merge_lora],
    )
    opened = open_checkpoint(folder, open_options)
    losses = [*opened.omissions, *absent_tensors(opened), *unsupported_settings(opened)]
    _note_losses(opened, losses, options)
    if opened.has_encoders and not opened.kind:
        opened.notes += (ENCODERS_NOTE,)
    return opened


def _note_losses(opened: Checkpoint, losses: Sequence[str], options: ConvertOptions) -> None:
    """Add notes on what the file does not represent. Raises TypeNotSupported with ``strict``."""
    if losses and options.strict:
        raise TypeNotSupported(
            "; ".join(losses) + "; --strict does not allow this loss: omit --strict to convert without it", "QK-E305"
        )
    opened.notes += tuple(losses)


def _lossless_rules(opened: Checkpoint) -> list[Rule]:
    """Return rules that keep tensors already stored as blocks."""
    blocks = [t for t in opened.tensors.values() if t.type.block > 1]
    return [Rule(f"^{re.escape(t.name)}$", t.type, "--lossless") for t in blocks]


def _prune(opened: Checkpoint, options: ConvertOptions) -> Source:
    """Return the source with the experts that are requested."""
    if options.prune_experts is None:
        return opened
    return prune_source(opened, read_experts(options.prune_experts, opened))


def _files(opened: Checkpoint, options: ConvertOptions) -> tuple[Path, ...]:
    return (*opened.files, *([] if options.prune_experts is None else [options.prune_experts]))


def _output_tensor(opened: Checkpoint, t: TensorInfo) -> OutputTensor:
    name, target = t.name, opened.converted[t.name].target_type
    if t.type.block > 1:
        return OutputTensor(name, t.shape, target, "kept as it is stored", (whole_tensor(t),))
    outtype = opened.outtype.type
    reason = f"--outtype {opened.outtype.name.lower()}" if target is outtype else "not of the file's type"
    encoder = "" if t.type is target else encoder_for(target)
    fallback_from = outtype if target.name == "F16" and t.shape[0] % outtype.block else None
    return OutputTensor(name, t.shape, target, reason, (whole_tensor(t),), fallback_from, encoder)


def _shards(tensors: Sequence[OutputTensor], options: ConvertOptions) -> list[int] | None:
    """Return the shard of each tensor, split as by convert_hf_to_gguf.py; None for a single file."""
    max_tensors = options.split_max_tensors
    size = size_of(options.split_max_size) if options.split_max_size is not None else 0
    if not max_tensors and not size:
        return None
    shards = []
    count = 0
    nbytes = 0
    no = 0
    for c in tensors:
        if count and ((max_tensors and count >= max_tensors) or (size and nbytes + c.nbytes > size)):
            no = no + 1
            count = 0
            nbytes = 0
        count, nbytes = count + 1, nbytes + c.nbytes
        shards.append(no)
    return shards


def _output_path(opened: Checkpoint, output: str | Path | None, encoding: str) -> Path:
    """Return the output's path; for a directory, by default the checkpoint's, a name from the metadata."""
    folder = opened.paths[0] if output is None else locate(output)
    if folder.is_dir():
        return folder / opened.general.file_name(None if opened.kind == "vocab" else encoding, kind=opened.kind)
    return resolve_links(folder.with_name(fill_template(folder.name, encoding)))
