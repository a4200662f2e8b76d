"""The options of `sensitivity`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import Options, option

#: Default types; those that need an importance matrix are left out without one.
TYPES = ("IQ1_M", "IQ2_XXS", "IQ2_S", "Q2_K", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
#: Default number of types of each group that run to the end of the model, and up to how many types all of them do.
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
        (), f"Types, separated by commas. Default: {','.join(TYPES)}.", MEASUREMENT, kind="types", metavar="TYPES"
    )
    groups: str = option(
        GROUPS[0],
        "Tensors of a group: those of a class in a layer, those of a class in all layers, or a single one. All experts "
        "of a tensor have one type.",
        MEASUREMENT,
        choices=GROUPS,
    )
    imatrix: Path | None = option(None, "Importance matrix, as for quantize; some types need one.", MEASUREMENT)
    feedback: Path | None = option(
        None, "Covariances, to also measure types with error feedback.", MEASUREMENT, metavar="COV"
    )
    full_runs: int | None = option(
        None,
        "Types of each group to run to the end of the model, -1 for all; costs of the others are predicted from the "
        f"error at the end of their layer. Default: all of up to {ALL_FULL_TYPES} types, {FULL_RUNS} of more.",
        MEASUREMENT,
        least=-1,
        metavar="N",
    )
    proxies_only: bool = option(False, "Measure one type of each group, predict the others.", MEASUREMENT)
    together: bool = option(
        True,
        "Also measure all groups in each type at once, to learn how costs combine.",
        MEASUREMENT,
        flags=("--together/--no-together",),
    )
    allow_requantize: bool = option(False, "Accept tensors that are quantized already.", MEASUREMENT)

    n_ctx: int = option(512, "Tokens per chunk.", TEXT, least=4, flags=("-c", "--ctx-size"))
    chunks: int | None = option(None, "Number of chunks; -1 (default): all.", TEXT, kind="chunks")

    n_batch: int = option(4096, "Tokens per batch.", RUN, least=1, flags=("-b", "--batch-size"))
    kv_type: str = "f16"
    threads: int | None = None
    max_ram: int | None = option(None, "Memory for weights; the rest is streamed.", RUN, kind="size", metavar="SIZE")
    cache: Path | None = None
    cache_size: int | None = None
    resume: bool = False
    overwrite: bool = False
