"""Convert a checkpoint of Hugging Face: ``quantkit convert``, convert_hf_to_gguf.py and llama-quantize in one pass.

plan_convert(...)  ->  Plan    every type, offset and byte count, from headers alone, nothing written
convert(...)       ->  QuantizeResult    the plan carried out
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.checkpoint.architectures import ROWS
from quantkit.checkpoint.fused import FUSIONS
from quantkit.checkpoint.general import templated
from quantkit.checkpoint.lora.peft import parse_adapter
from quantkit.checkpoint.nextn import ONLY, WITH, WITHOUT
from quantkit.checkpoint.policy import OUTTYPE_NAMES
from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.formats.outputs import end_of_links
from quantkit.formats.remote import located
from quantkit.kernels.formats import encoder_for
from quantkit.pipeline.plan import Chosen, Plan, plan_output
from quantkit.pipeline.planned import whole
from quantkit.pipeline.recipe import Rule
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions
from quantkit.quantize import QuantizeOptions, QuantizeResult, check_options, plan_from, run_quantize, size_of, title_of
from quantkit.version import __version__

#: What --intermediate takes: the types that rows are rounded to between the two programs, or none.
INTERMEDIATES = ("auto", "bf16", "f16", "f32", "none")

#: Options that have no meaning where the output is quantized.
_WITHOUT_TYPE = (
    *("outtype", "fp8_as_q8", "vocab_only"),
    *("split_max_tensors", "no_tensor_first_split", "split_max_size"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Everything about a conversion but directory, output and type; names as on the command line.

    ``outtype``, ``fp8_as_q8``, ``vocab_only`` and splits (those of convert_hf_to_gguf.py) are for a conversion without
    a type, ``intermediate`` for one that also quantizes. ``mtp`` and ``no_nextn`` are about layers that predict more
    tokens: only them, or none of them. ``lossless`` keeps quantized weights as blocks wherever that changes no value.
    ``merge_lora``: directories of LoRA adapters, each with ":SCALE" or without, that are merged in their order.
    """

    outtype: str = "auto"
    intermediate: str = "auto"
    pre: str | None = None
    model_name: str | None = None
    metadata: Path | None = None
    mtp: bool = False
    no_nextn: bool = False
    fuse_gate_up_exps: bool = False
    fuse_qkv: bool = False
    fp8_as_q8: bool = False
    vocab_only: bool = False
    lossless: bool = False
    merge_lora: tuple[str, ...] = ()
    split_max_tensors: int = 0
    split_max_size: str | int | None = None
    no_tensor_first_split: bool = False


def convert(
    folder: str | Path,
    output: str | Path | None = None,
    type: str | None = None,  # noqa: A002 - the word of the command line
    options: ConvertOptions | None = None,
    quantize: QuantizeOptions | None = None,
    *,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Convert the checkpoint in ``folder``; with a type, quantize it in the same pass.

    Args:
        folder: config.json, model*.safetensors, the files of the tokenizer.
        output: the file to write, in whose name {ftype} stands for the type, or a directory; None for the name that
            convert_hf_to_gguf.py gives it, in ``folder``.
        type: as for ``quantize``, "LIKE" with ``quantize.like``; None for a conversion to ``options.outtype``.
        options: everything else that decides what is converted.
        quantize: options of ``quantize``, with a type.
        max_ram: bytes (or "2G") that the workers' buffers may take together.
        run: threads, resume, overwrite, measure_error, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; nothing stands under the final name then.
    """
    return run_quantize(plan_convert(folder, output, type, options, quantize), max_ram=max_ram, **run)


def plan_convert(
    folder: str | Path,
    output: str | Path | None = None,
    type: str | None = None,  # noqa: A002
    options: ConvertOptions | None = None,
    quantize: QuantizeOptions | None = None,
) -> Plan:
    """Decide everything about a conversion and write nothing; arguments and errors as for ``convert``."""
    options = options or ConvertOptions()
    _check(options, type, quantize)
    if type is not None:
        given = quantize or QuantizeOptions()
        check_options(type, given)
        opened = _open(folder, options, options.intermediate)
        path = _output_path(opened, output, title_of(type, given))
        identity = f" intermediate {options.intermediate}"
        if options.lossless:
            given = replace(given, ready_rules=(*given.ready_rules, *_kept(opened)))
        try:
            plan = plan_from(opened, path, type, given, reads=opened.files, identity=identity)
        except TypeNotSupported as e:
            more = "; --lossless keeps them as they are" if e.message.startswith("already quantized") else ""
            raise TypeNotSupported(e.message + more) from None
        return replace(plan, notes=(*opened.notes, *plan.notes))
    return plan_opened(_open(folder, options, options.outtype), output, options)


def plan_opened(opened: Checkpoint, output: str | Path | None, options: ConvertOptions) -> Plan:
    """Decide everything about a conversion without a type; ``options`` say how it is split."""
    chosen = [_chosen(opened, name) for name in opened.tensors]
    return plan_output(
        opened,
        _output_path(opened, output, opened.outtype.name),
        list(opened.fields.values()),
        chosen,
        title=opened.outtype.name,
        notes=[*opened.notes, *_notes(opened, chosen)],
        shard_of=_shards(chosen, options),
        identity=f"{__version__} convert {opened.fingerprint()}",
        reads=opened.files,
        all_dims=True,
        empty_first=options.no_tensor_first_split,
        pad_header=not options.vocab_only,
    )


def architectures() -> dict[str, str]:
    """Return the classes that are converted, and what each is called in GGUF."""
    return {name: row.arch for name, row in sorted(ROWS.items())}


def _check(options: ConvertOptions, type: str | None, quantize: QuantizeOptions | None) -> None:  # noqa: A002
    """Refuse options that have no meaning in this form."""
    default = ConvertOptions()
    if options.outtype not in OUTTYPE_NAMES:
        raise RecipeError(f"--outtype {options.outtype}: there are {', '.join(OUTTYPE_NAMES)}")
    if options.intermediate not in INTERMEDIATES:
        raise RecipeError(f"--intermediate {options.intermediate}: there are {', '.join(INTERMEDIATES)}")
    if options.vocab_only and options.merge_lora:
        raise RecipeError("--merge-lora changes weights, and --vocab-only has none: leave one of them away")
    if options.mtp and options.no_nextn:
        raise RecipeError("--mtp and --no-nextn exclude each other: run twice for two files")
    if type is None:
        if options.intermediate != default.intermediate:
            raise RecipeError("--intermediate rounds what is then quantized: give a TYPE, or leave it away")
        if quantize is not None and quantize != QuantizeOptions():
            raise RecipeError("options of quantize need a TYPE to quantize to: quantkit convert DIR OUT.gguf Q4_K_M")
        return
    for name in _WITHOUT_TYPE:
        if getattr(options, name) != getattr(default, name):
            raise RecipeError(f"--{name.replace('_', '-')} is for a conversion without TYPE: leave one of them away")
    if quantize is not None and (quantize.keep_split or quantize.repack or quantize.unrepack):
        raise RecipeError("--keep-split, --repack and --unrepack are about GGUF files; a checkpoint is none")


def _open(folder: str | Path, options: ConvertOptions, outtype: str) -> Checkpoint:
    exact = outtype in ("none", "q8_0", "tq1_0", "tq2_0")
    return open_checkpoint(
        folder,
        outtype="auto" if outtype == "none" else outtype,
        exact=exact,
        pre=options.pre,
        model_name=options.model_name,
        metadata=options.metadata,
        nextn=ONLY if options.mtp else WITHOUT if options.no_nextn else WITH,
        fuse=[f.option for f in FUSIONS if getattr(options, f.option[2:].replace("-", "_"))],
        fp8_as_q8=options.fp8_as_q8,
        vocab_only=options.vocab_only,
        lossless=options.lossless,
        adapters=[parse_adapter(str(each)) for each in options.merge_lora],
    )


def _kept(opened: Checkpoint) -> list[Rule]:
    """Return rules for tensors that are blocks already: they stay so."""
    blocks = [t for t in opened.tensors.values() if t.type.block > 1]
    return [Rule(f"^{re.escape(t.name)}$", t.type, "--lossless") for t in blocks]


def _chosen(opened: Checkpoint, name: str) -> Chosen:
    made = opened.made[name]
    t, wanted = made.info, made.wanted
    if t.type.block > 1:
        return Chosen(name, t.shape, wanted, "kept as it is stored", (whole(t),))
    reason = f"--outtype {opened.outtype.name.lower()}" if wanted is opened.outtype.type else "not of the file's type"
    encoder = "" if t.type is wanted else encoder_for(wanted)
    return Chosen(name, t.shape, wanted, reason, (whole(t),), encoder=encoder)


def _notes(opened: Checkpoint, chosen: Sequence[Chosen]) -> list[str]:
    wanted = opened.outtype.type
    odd = [c.name for c in chosen if wanted.block > 1 and c.type.name == "F16" and c.shape[0] % wanted.block]
    return [f"{len(odd)} tensors stay F16, their rows do not divide into blocks: {odd[0]}, .."] if odd else []


def _shards(chosen: Sequence[Chosen], options: ConvertOptions) -> list[int] | None:
    """Return the shard of each tensor, as convert_hf_to_gguf.py splits; None for one file."""
    most = options.split_max_tensors
    size = size_of(options.split_max_size) if options.split_max_size is not None else 0
    if not most and not size:
        return None
    shards, here, nbytes, no = [], 0, 0, 0
    for c in chosen:
        if here and ((most and here >= most) or (size and nbytes + c.nbytes > size)):
            no, here, nbytes = no + 1, 0, 0
        here, nbytes = here + 1, nbytes + c.nbytes
        shards.append(no)
    return shards


def _output_path(opened: Checkpoint, output: str | Path | None, encoding: str) -> Path:
    """Return the output's path; in a directory, the checkpoint's without one, the name that the model gives itself."""
    folder = opened.paths[0] if output is None else located(output)
    if folder.is_dir():
        return folder / opened.general.file_name(None if opened.kind == "vocab" else encoding, kind=opened.kind)
    return end_of_links(folder.with_name(templated(folder.name, encoding)))
