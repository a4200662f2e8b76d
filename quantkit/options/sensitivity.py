"""The options of `sensitivity`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.activations import ACTIVATIONS, EXACT
from quantkit.arguments import Options, option

#: Default types; without an importance matrix, those that need one are skipped.
TYPES = ("IQ1_M", "IQ2_XXS", "IQ2_S", "Q2_K", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
#: Default number of types per group that run to the end of the model, and the number of types up to which all do.
FULL_RUNS, ALL_FULL_TYPES = 2, 4
#: Values of --groups.
GROUPS = ("class-layer", "class", "tensor")
#: Headings of --help.
TEXT, MEASUREMENT, RUN = "Text", "Measurement", "Run"


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityOptions(Options):
    """Types, amount of text and method of a measurement; names as on the command line.

    Each option is declared here alone. Costs of types that ``full_runs`` leaves out have a ``Cost.kld`` of None.
    """

    types: tuple[str, ...] = option(
        (), f"Types to measure.  [default: {', '.join(TYPES)}]", MEASUREMENT, kind="types", metavar="TYPE,.."
    )
    groups: str = option(
        GROUPS[0],
        "What a group is: a tensor class in one layer, a tensor class in all layers, or one tensor.",
        MEASUREMENT,
        choices=GROUPS,
    )
    imatrix: Path | None = option(None, "Importance matrix for quantizing; some types need one.", MEASUREMENT)
    feedback: Path | None = option(
        None, "Also measure types with error feedback, by these covariances.", MEASUREMENT, metavar="COV.gguf"
    )
    full_runs: int | None = option(
        None,
        "Types per group to run to the end of the model; -1: all. The divergence of the other types is predicted "
        "from the error "
        f"at the end of their layer.  [default: all of up to {ALL_FULL_TYPES} types, {FULL_RUNS} of more]",
        MEASUREMENT,
        least=-1,
        metavar="N",
    )
    proxies_only: bool = option(False, "Measure one type per group and predict the others.", MEASUREMENT)
    together: bool = option(
        True,
        "Also measure each type for all groups at once, to learn how divergences combine (default).",
        MEASUREMENT,
        flags=("--together/--no-together",),
    )
    allow_requantize: bool = option(False, "Allow tensors that are quantized already.", MEASUREMENT)

    n_ctx: int = option(512, "Tokens per chunk.", TEXT, least=4, flags=("-c", "--ctx-size"))
    chunks: int | None = option(None, "Number of chunks.  [default: all]", TEXT, kind="chunks")

    n_batch: int = option(4096, "Logical batch size.", RUN, least=1, flags=("-b", "--batch-size"))
    kv_type: str = "f16"
    activations: str = option(
        EXACT,
        "Activations: exact (f32, times decoded weights: figures of the weights alone) or runtime (rounded as by "
        "llama.cpp).",
        RUN,
        choices=ACTIVATIONS,
    )
    threads: int | None = None
    max_ram: int | None = option(
        None, "Maximum memory for weights; the rest is streamed from the file.", RUN, kind="size", metavar="SIZE"
    )
    cache: Path | None = None
    cache_size: int | None = None
    resume: bool = False
    overwrite: bool = False
