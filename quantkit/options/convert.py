"""Options of `convert` besides those of `quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import Options, option

#: Heading of --help.
CHECKPOINT = "Checkpoint"
#: Types of a file that is converted alone, as --outtype of convert_hf_to_gguf.py.
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto")
#: Types that values are rounded to between the two programs, or none.
INTERMEDIATES = ("auto", "bf16", "f16", "f32", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(Options):
    """Everything about a conversion but directory, output and type; names as on the command line.

    Each option is declared here alone: the command line, the [convert] table of cook.toml and their help follow.
    """

    outtype: str = option(
        "auto",
        "Without TYPE: type of the matrices; auto: as stored.",
        CHECKPOINT,
        choices=OUTTYPES,
        example='"bf16"',
    )
    intermediate: str = option(
        "auto",
        "With TYPE: type to round values to first, as convert_hf_to_gguf.py does; none: keep them exact.",
        CHECKPOINT,
        choices=INTERMEDIATES,
    )
    pre: str | None = option(
        None, "Pre-tokenizer, if it is not recognized.", CHECKPOINT, metavar="NAME", example='"gpt-2"'
    )
    allow_other_ids: bool = option(
        False,
        "Allow a --pre that gives other token ids than the tokenizer.",
        CHECKPOINT,
        example="true",
    )
    model_name: str | None = option(
        None, "Name of the model (general.name).", CHECKPOINT, metavar="NAME", example='"My model"'
    )
    metadata: Path | None = option(
        None, "JSON file of metadata that override those of the model card.", CHECKPOINT, example='"metadata.json"'
    )
    mtp: bool = option(False, "Convert only the MTP layers, as a draft model.", CHECKPOINT)
    no_nextn: bool = option(
        False, "Drop the MTP (NextN) layers.", CHECKPOINT, flags=("--no-nextn", "--no-mtp"), example="true"
    )
    target_model_dir: Path | None = option(
        None,
        "Of a draft model (EAGLE-3, DFlash, DSpark): checkpoint of the model it guesses for.",
        CHECKPOINT,
        kind="folder",
        metavar="DIR",
    )
    base: Path | None = option(
        None,
        "Of a model that is an adapter (Lev, Kev, Nimble): checkpoint of its base.",
        CHECKPOINT,
        kind="folder",
        metavar="DIR",
    )
    dspark: bool = option(False, "Convert only the draft model (DSpark) of DeepSeek V4.", CHECKPOINT)
    fuse_gate_up_exps: bool = option(False, "Merge up and gate experts into one tensor.", CHECKPOINT, example="true")
    fuse_qkv: bool = option(False, "Merge q, k and v into one tensor.", CHECKPOINT, example="true")
    fp8_as_q8: bool = option(False, "Without TYPE: write FP8 weights as Q8_0.", CHECKPOINT)
    vocab_only: bool = option(False, "Without TYPE: write metadata and vocabulary only.", CHECKPOINT)
    mistral_format: bool = option(
        False, "Read Mistral's own format: params.json, consolidated*.safetensors.", CHECKPOINT, example="true"
    )
    disable_mistral_community_chat_template: bool = option(
        False, "With --mistral-format: only the checkpoint's own chat template.", CHECKPOINT
    )
    sentence_transformers_dense_modules: bool = option(
        False, "Include the dense layers after the pooling (modules.json).", CHECKPOINT, example="true"
    )
    lossless: bool = option(
        False, "Keep quantized weights where no value changes: int4 as Q4_0, int8 as Q8_0.", CHECKPOINT
    )
    allow_incomplete: bool = False
    strict: bool = option(False, "Fail if GGUF cannot express a setting of the model.", CHECKPOINT, example="true")
    merge_lora: tuple[str, ...] = option(
        (),
        "Merge a PEFT LoRA adapter (a directory) into the weights; repeatable.",
        CHECKPOINT,
        kind="folder",
        metavar="ADAPTER[:SCALE]",
        example='["adapter:0.5"]',
    )
    prune_experts: Path | None = option(
        None,
        "Only these experts: list or file of `quantkit prune-experts`.",
        CHECKPOINT,
        metavar="FILE",
        example='"experts.json"',
    )
    bigendian: bool = option(False, "Write a big-endian file, for machines such as s390x.", CHECKPOINT)
    reserve: str | int | None = option(
        None,
        "Room for later edits in place (64K), atomic ones with as much as keys take; convert_hf_to_gguf.py has none.",
        CHECKPOINT,
        kind="size",
        metavar="SIZE",
    )
    split_max_tensors: int = option(0, "Maximum number of tensors in a shard.", CHECKPOINT)
    split_max_size: str | int | None = None
    no_tensor_first_split: bool = option(False, "Write only metadata to the first shard.", CHECKPOINT)
