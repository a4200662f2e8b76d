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
        "Without TYPE: type of the matrices; auto is the type they are stored in.",
        CHECKPOINT,
        choices=OUTTYPES,
        example='"bf16"',
    )
    intermediate: str = option(
        "auto",
        "With TYPE: type that values are rounded to first, as llama.cpp's two programs do; none keeps them exact.",
        CHECKPOINT,
        choices=INTERMEDIATES,
    )
    pre: str | None = option(
        None, "Name of the pre-tokenizer, if it is not recognized.", CHECKPOINT, metavar="NAME", example='"gpt-2"'
    )
    allow_other_ids: bool = option(
        False,
        "Write the vocabulary even if --pre gives other token ids than the tokenizer.",
        CHECKPOINT,
        example="true",
    )
    model_name: str | None = option(
        None, "Model name (general.name).", CHECKPOINT, metavar="NAME", example='"My model"'
    )
    metadata: Path | None = option(
        None, "JSON file of metadata that overrides the model card's.", CHECKPOINT, example='"metadata.json"'
    )
    mtp: bool = option(False, "Only the MTP layers, as a draft model.", CHECKPOINT)
    no_nextn: bool = option(
        False, "Drop the MTP (NextN) layers.", CHECKPOINT, flags=("--no-nextn", "--no-mtp"), example="true"
    )
    fuse_gate_up_exps: bool = option(False, "Merge gate and up experts into one tensor.", CHECKPOINT, example="true")
    fuse_qkv: bool = option(False, "Merge queries, keys and values into one tensor.", CHECKPOINT, example="true")
    fp8_as_q8: bool = option(False, "Without TYPE: write FP8 weights as Q8_0.", CHECKPOINT)
    vocab_only: bool = option(False, "Without TYPE: write only metadata and vocabulary.", CHECKPOINT)
    lossless: bool = option(
        False, "Keep quantized weights as blocks where no value changes: int4 as Q4_0, int8 as Q8_0.", CHECKPOINT
    )
    allow_incomplete: bool = False
    strict: bool = option(
        False, "Make it an error if GGUF cannot express a setting of the model.", CHECKPOINT, example="true"
    )
    merge_lora: tuple[str, ...] = option(
        (),
        "Merge a PEFT LoRA adapter (a directory) into the weights; repeatable, in order.",
        CHECKPOINT,
        kind="folder",
        metavar="ADAPTER[:SCALE]",
        example='["adapter:0.5"]',
    )
    split_max_tensors: int = option(0, "Maximum number of tensors in a shard.", CHECKPOINT)
    split_max_size: str | int | None = None
    no_tensor_first_split: bool = option(False, "Make the first shard metadata only.", CHECKPOINT)
