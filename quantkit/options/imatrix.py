"""The options of `imatrix`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from quantkit.arguments import Options, option

Format = Literal["gguf", "dat"]
Fill = Literal["none", "ones", "mean", "neighbour"]

#: Formats of an importance matrix, namings of up and gate experts, and values for experts without tokens.
FORMATS: tuple[str, ...] = get_args(Format)
NAMES = ("merged", "separate", "both")
FILLS: tuple[str, ...] = get_args(Fill)
#: Headings of --help.
TEXT, OUTPUT, FURTHER = "Text", "Output", "Further recordings"


@dataclass(frozen=True, kw_only=True)
class ImatrixOptions(Options):
    """Options of a collection and of its output; names as on the command line. Each option is declared here alone.

    ``n_batch`` is the number of tokens of a pass; max(1, n_batch // n_ctx) chunks run together.
    """

    n_ctx: int = option(512, "Tokens per chunk.", TEXT, least=4, flags=("-c", "--ctx-size"))
    n_batch: int = 2048
    chunks: int | None = option(None, "Number of chunks.  [default: all]", TEXT, kind="chunks")
    from_chunk: int = option(0, "Skip the first N chunks.", TEXT, flags=("--chunk", "--from-chunk"))
    parse_special: bool = option(False, "Parse special tokens such as <|im_end|> in texts.", TEXT)
    ppl: bool = option(True, "Compute the perplexity (default).", TEXT, flags=("--ppl/--no-ppl",))

    output_format: Format | None = option(
        None, "Output format.  [default: dat if OUT ends in .dat, else gguf]", OUTPUT, choices=FORMATS
    )
    output_frequency: int = option(
        10, "Write the output every N chunks; 0: only at the end.", OUTPUT, flags=("-ofreq", "--output-frequency")
    )
    save_frequency: int = option(0, "Write a copy, OUT.at_N, every N chunks.", OUTPUT)
    resume: bool = option(False, "Continue an interrupted run; do nothing after a complete one.", OUTPUT)
    overwrite: bool = option(False, "Replace an existing output.", OUTPUT)
    names: str | None = option(
        None, "Names of up and gate experts.  [default: both if merged, else unchanged]", OUTPUT, choices=NAMES
    )
    fill: str | None = option(None, "Values for experts without tokens, recorded in the file.", OUTPUT, choices=FILLS)

    process_output: bool = option(False, "Also record the output matrix (output.weight).", FURTHER)
    nextn: bool = option(False, "Also record the MTP (NextN) layers.", FURTHER)
    all_experts: bool = option(False, "Also write OUT.all-experts, with every token sent to every expert.", FURTHER)
    saliency: bool = option(False, "Also record the saliency of experts, for prune-experts.", FURTHER)
    layer_similarity: bool = option(
        False,
        "Report the cosine similarity of each layer's input and output; without -o, write no importance matrix.",
        FURTHER,
        flags=("-lsim", "--layer-similarity"),
    )
