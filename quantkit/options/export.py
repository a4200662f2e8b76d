"""The options of `export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import Options, option

#: Heading of --help.
CHECKPOINT = "Checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(Options):
    """Everything about an export but input and directory; names as on the command line. Each is declared here alone."""

    outtype: str = option(
        "auto",
        "Data type; auto: that of the matrices, or bf16 if quantized.",
        CHECKPOINT,
        choices=("f32", "f16", "bf16", "auto"),
    )
    architecture: str | None = option(
        None, "Model class, if the architecture has more than one.", CHECKPOINT, metavar="NAME", flags=("--class",)
    )
    mmproj: Path | None = option(
        None, "File of the vision encoder: export the whole model.", CHECKPOINT, kind="model", metavar="FILE"
    )
    tokenizer: bool = option(
        True, "Write the tokenizer's files (default).", CHECKPOINT, flags=("--tokenizer/--no-tokenizer",)
    )
    max_shard_size: int | str = option("5GB", "Maximum size of a shard.", CHECKPOINT, kind="shard size")
