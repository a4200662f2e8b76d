"""The options of `quantize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.arguments import Options, declarations, option
from quantkit.kernels.formats import ENCODERS
from quantkit.pipeline.custom_encoder import RowEncoder
from quantkit.pipeline.presets import RULES
from quantkit.pipeline.recipe import Rule

#: More layers than any model has, so that a typo does not become a list of billions.
_MAX_LAYERS = 1 << 16
#: Headings of --help.
INPUT = "Input"
TYPES = "Tensor types (the first that applies: own option, rule, class option, preset)"
IMATRIX = "Importance matrix and error feedback"
METADATA = "Metadata and shards"


def _type(tensors: str) -> Any:
    return option(None, f"Type of {tensors}.", TYPES, kind="type", example='"Q8_0"')


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions(Options):
    """Everything about a quantization but the two files and TYPE; names as on the command line.

    Each option is declared here alone: the command line, the [quantize] table of cook.toml and their help follow. The
    order is that in which provenance lists them.

    Only from Python: ``ready_rules``, rules that need not be parsed, before all others (``parse_recipe(text).rules``);
    ``encoders``, by type a function that replaces quantkit's encoder. It is called with rows, float32 [rows, n], and
    their importance, float32 [n] or None, some rows of a tensor at a time, from several threads, and returns their
    bytes, uint8 [rows, row_bytes]. Its name is recorded in the file. The tensor cache and ``resume`` need a function
    with an attribute ``cache_key``, a text that changes whenever its bytes may.
    """

    rules: str | None = option(
        None,
        "Whose type rules, fallbacks and tensor order to follow.  [default: those of TYPE's project]",
        TYPES,
        choices=RULES,
        example='"ik"',
    )

    imatrix: Path | None = option(None, "Importance matrix, GGUF or .dat.", IMATRIX, kind="imatrix")
    include_weights: tuple[str, ...] = option(
        (),
        "Use only entries of the importance matrix whose name contains TEXT.",
        IMATRIX,
        metavar="TEXT",
        example='["blk"]',
    )
    exclude_weights: tuple[str, ...] = option(
        (),
        "Ignore entries of the importance matrix whose name contains TEXT.",
        IMATRIX,
        metavar="TEXT",
        example='["output"]',
    )
    ignore_imatrix_rules: bool = option(
        False, "Allow low-bit types without an importance matrix.", IMATRIX, example="true"
    )
    hide_imatrix: bool = option(False, "Do not record the name of the importance matrix.", IMATRIX, example="true")
    feedback: Path | None = option(
        None,
        "GPTQ error feedback with covariances of `imatrix --covariance`, or of --calibrate if omitted.",
        IMATRIX,
        kind="covariances",
        metavar="[COV.gguf]",
    )
    calibrate: tuple[Path, ...] = option(
        (),
        "GPTQ error feedback layer by layer, with the activations of this text or these chats; repeatable.",
        IMATRIX,
        metavar="TEXT|CHATS.jsonl",
    )
    calibrate_ctx: int = option(512, "Tokens per chunk of --calibrate.", IMATRIX, least=4)
    calibrate_chunks: int | None = option(
        None, "Number of chunks of --calibrate.  [default: all]", IMATRIX, least=1, metavar="N"
    )
    balance: bool = option(
        True,
        "With --calibrate: equalize activation channels first, as SmoothQuant and AWQ do (default). The model computes "
        "the same function.",
        IMATRIX,
        flags=("--balance/--no-balance",),
        example="false",
    )
    like: Path | None = option(
        None, "Copy the type of each tensor from this GGUF file, instead of TYPE.", TYPES, metavar="FILE"
    )
    ready_rules: tuple[Rule, ...] = ()
    encoders: Mapping[str, RowEncoder] | None = None
    recipe: tuple[Path, ...] = option(
        (),
        "File of rules `regex = type`, one per line.",
        TYPES,
        flags=("-r", "--recipe"),
        example='["my.recipe"]',
    )
    tensor_type: tuple[str, ...] = option(
        (),
        "Type of tensors whose name matches RE; repeatable.",
        TYPES,
        kind="type",
        metavar="RE=TYPE",
        example='["attn_v=Q8_0"]',
    )
    tensor_type_file: tuple[Path, ...] = option(
        (), "File of RE=TYPE rules, as of llama-quantize.", TYPES, example='["types.txt"]'
    )
    custom_q: tuple[str, ...] = option(
        (), "Rules in the syntax of ik_llama.cpp.", TYPES, kind="type", metavar="RE=TYPE,..", example='["attn_v=q8_0"]'
    )
    output_tensor_type: str | None = _type("output.weight")
    token_embedding_type: str | None = _type("the token embeddings")
    per_layer_token_embedding_type: str | None = _type("the per-layer token embeddings (Gemma 3n and 4)")
    extra_output_tensor: str | None = option(
        None,
        "Add a second output matrix of this type, with which ik_llama.cpp drafts.",
        TYPES,
        kind="type",
        example='"Q4_0"',
    )
    ffn_gate_inp_type: str | None = option(
        None, "Type of the router.  [default: unchanged]", TYPES, kind="type", example='"Q8_0"'
    )
    attn_q_type: str | None = _type("all attn_q tensors")
    attn_k_type: str | None = _type("all attn_k tensors")
    attn_v_type: str | None = _type("all attn_v tensors")
    attn_qkv_type: str | None = _type("all attn_qkv tensors")
    attn_output_type: str | None = _type("all attn_output tensors")
    ffn_gate_type: str | None = _type("all ffn_gate tensors, experts included")
    ffn_up_type: str | None = _type("all ffn_up tensors, experts included")
    ffn_down_type: str | None = _type("all ffn_down tensors, experts included")
    pure: bool = option(
        False,
        "Ignore the preset's type rules: use its base type for all matrices.",
        TYPES,
        example="true",
    )
    leave_output_tensor: bool = option(False, "Do not quantize output.weight.", TYPES, example="true")
    allow_requantize: bool = option(False, "Allow tensors that are quantized already.", INPUT)
    allow_incomplete: bool = option(
        False, "Allow a model whose tensors are missing or contradict the metadata, which no runtime loads.", INPUT
    )
    fallback: str = option(
        "next",
        "For row lengths that are not multiples of the block: fail, use llama.cpp's next type, or TYPE.",
        TYPES,
        kind="type",
        metavar="error|next|TYPE",
        example='"error"',
    )
    encoder: str | None = option(
        None,
        "Whose encoder to use for types that both have.  [default: llama.cpp; ik for interleaved types]",
        TYPES,
        choices=ENCODERS,
        example='"ik"',
    )
    symmetric_q40: bool = option(
        False, "Use levels -7..7 for Q4_0, without the importance matrix.", TYPES, example="true"
    )
    tensor_scales: bool = option(
        True,
        "Write NVFP4 with a scale of each matrix, as NVIDIA's checkpoints have, where llama.cpp reads one (default).",
        TYPES,
        flags=("--tensor-scales/--no-tensor-scales",),
        example="false",
    )
    keep_grid: bool = option(
        False,
        "Encode weights exactly that lie on the grid of a type (QAT checkpoints, dequantized files); a tensor on the "
        "grid of a type no larger than its own gets that type.",
        TYPES,
        example="true",
    )
    merge_up_gate: bool = option(False, "Merge up and gate experts, as merge-up-gate does.", INPUT)
    split_up_gate: bool = option(False, "Split merged experts, as split-up-gate does.", INPUT)
    merge_lora: tuple[str, ...] = option(
        (),
        "Merge a LoRA adapter (a GGUF file) into the weights; repeatable.",
        INPUT,
        kind="adapter",
        metavar="ADAPTER[:SCALE]",
    )
    prune_layers: tuple[int, ...] = option(
        (),
        "Remove these layers (3,7-9) and renumber the rest.",
        INPUT,
        kind="layers",
        metavar="L,L,..",
        example='"3,7-9"',
    )
    repack: bool = option(False, "Interleave rows (Q4_K to Q4_K_R4); values do not change.", INPUT)
    unrepack: bool = option(False, "Undo --repack (Q4_K_R4 to Q4_K).", INPUT)
    repack_pattern: tuple[str, ...] = option((), "Repack only matching tensors.", INPUT, metavar="RE,RE,..")
    override_kv: tuple[str, ...] = option(
        (),
        "Set a metadata key. T: int, float, bool, str or u8 to f64; str:@FILE reads a file.",
        METADATA,
        metavar="KEY=T:V",
        example='["general.name=str:My model"]',
    )
    keep_split: bool = option(False, "Write one output shard per input shard.", METADATA)
    split_max_size: str | int | None = option(
        None, "Maximum size of a shard (48G).", METADATA, kind="shard size", example='"48G"'
    )
    reserve: str | int | None = option(
        None,
        "Leave room for later edits in place (64K), atomic ones with as much as keys take; llama-quantize does not.",
        METADATA,
        kind="size",
        metavar="SIZE",
    )
    bigendian: bool = option(False, "Write a big-endian file, for machines such as s390x.", METADATA)
    no_provenance: bool = option(
        False,
        "Write no quantkit.* keys: exactly the file of llama-quantize.",
        METADATA,
        example="true",
    )


def independent_of_search(name: str) -> bool:
    """Return whether an option is independent of the decisions of a search: types, and the model itself."""
    return name == "encoder" or declarations(QuantizeOptions)[name].group in (IMATRIX, METADATA)


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers of --prune-layers: numbers and ranges such as 20-27, separated by commas. Raises ValueError."""
    layers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not part.strip():
            continue
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"{part!r} is neither a layer number nor a range")
        begin, end = int(first), int(last or first)
        if not begin <= end < _MAX_LAYERS:
            raise ValueError(f"{part!r} is not a range of layers")
        layers.update(range(begin, end + 1))
    return tuple(sorted(layers))
