"""Facts about a model that the choice of types depends on: names, categories, layers, heads, experts.

Sources: llama.cpp b11434, src/llama-quant.cpp (tensor_get_category, tensor_allows_quantization),
src/llama-model-loader.h (weight_name_comparer) and src/llama-model.cpp (load_hparams) with src/models/*.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.errors import FormatError
from quantkit.formats.experts import GATE, MERGED, UP
from quantkit.types import TensorType

#: Returns the value of a GGUF key, or None.
Metadata = Mapping[str, Any] | Callable[[str], Any]


class TensorLike(Protocol):
    """Protocol of a tensor's name, shape and type; quantkit.formats.gguf.TensorInfo has it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> TensorType: ...


# --- names ---------------------------------------------------------------------------------------------------

#: llama.cpp's categories, by the first of these texts in a name; output and token_embd must be the whole name.
_CATEGORIES = {
    **{f"{field}.weight": field for field in ("attn_qkv", "attn_kv_b", "attn_v", "attn_k", "attn_q", "attn_output")},
    "ffn_up": "ffn_up",
    "ffn_gate": "ffn_gate",
    "ffn_down": "ffn_down",
}
TOKEN_EMBD_NAMES = ("token_embd.weight", "per_layer_token_embd.weight")
#: A second, smaller output, with which ik_llama.cpp drafts tokens.
EXTRA_OUTPUT = "output_extra.weight"
ATTN_V_LIKE = ("attn_v", "attn_qkv", "attn_kv_b")
ROUTER = "ffn_gate_inp.weight"
_LAYER = re.compile(r"blk\.\s*([+-]?\d{1,9})")


def category(name: str) -> str:
    """Return llama.cpp's category for the tensor ``name``; "other" for most."""
    if name == "output.weight":
        return "output"
    if name in TOKEN_EMBD_NAMES:
        return "token_embd"
    return next((label for text, label in _CATEGORIES.items() if text in name), "other")


_MERGED = re.compile(rf"(.*\.|){MERGED}(\.\w+)")


def half_names(name: str) -> tuple[str, str] | None:
    """Return the names of the gate and up halves of the merged experts ``name``; None for any other name."""
    match = _MERGED.fullmatch(name)
    return (match[1] + GATE + match[2], match[1] + UP + match[2]) if match else None


def layer_of(name: str) -> int:
    """Return the number N of ``blk.N.``, or -1 (as sscanf in llama.cpp's weight_name_comparer)."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def iteration_order(names: Iterable[str]) -> list[str]:
    """Return ``names`` in the order llama-quantize visits them: by layer, outside layers first, then by name."""
    return sorted(names, key=lambda name: (layer_of(name), name.encode()))


_TIME_MIX = (
    "first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2", "decay_w1", "decay_w2", "lerp_fused",
)  # fmt: skip
#: Parts of the names of tensors that are never quantized, with a description.
_UNQUANTIZED = {
    "_norm.weight": "norm",
    "ffn_gate_tid2eid.weight": "routing table",
    "altup": "small, AltUp",
    "laurel": "small, LAuReL",
    "per_layer_model_proj": "small projection",
    "ssm_conv1d": "small convolution",
    "shortconv.conv.weight": "small convolution",
    "indexer.k_proj.weight": "small, indexer",
    "indexer.q_proj.weight": "small, indexer",
    **{f"time_mix_{part}.weight": "small, RWKV" for part in _TIME_MIX},
    "attn_rel_b.weight": "relative position bias",
    **dict.fromkeys((".position_embd", "sam.pos_embd", ".rel_pos"), "positions"),
    **dict.fromkeys(("sam.neck.", "sam.net_", ".patch_embd", ".patch_merger"), "vision"),
    **dict.fromkeys(("a.rvq.codebook", "mm.a.code_embd"), "audio codebook"),
}
_UNQUANTIZED_NAMES = {"position_embd.weight": "positions", "token_types.weight": "token types"}
_UNQUANTIZED_GLM5_NEXT = (
    "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate", "indexer_compressor_ape",
    "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight", "ssm_beta.weight", "attn_kv_a_mqa.weight",
    "attn_k_b.weight", "attn_v_b.weight",
)  # fmt: skip

#: ik_llama.cpp's texts instead, besides _NEVER_EXACT.
_UNQUANTIZED_IK = {
    "_norm.weight": "norm",
    **dict.fromkeys(("ssm_conv1d", "ssm_x.weight", "ssm_dt.weight"), "small, Mamba"),
    "attn_rel_b.weight": "relative position bias",
}


def _is_weight(name: str) -> bool:
    # llama.cpp compares rfind("weight") with size - 6, which is npos for a name of 5 characters.
    return name.endswith("weight") or (len(name.encode()) == 5 and "weight" not in name)


def unquantized_reason(name: str, arch: str, ik: bool = False) -> str | None:
    """Return the reason why the tensor ``name`` is never quantized; None if it may be, and for the router."""
    if not _is_weight(name):
        return "no weight"
    if name in _UNQUANTIZED_NAMES:
        return _UNQUANTIZED_NAMES[name]
    for text, kind in (_UNQUANTIZED_IK if ik else _UNQUANTIZED).items():
        if text in name:
            return kind
    texts = _UNQUANTIZED_GLM5_NEXT if arch == "glm5-next" and not ik else ()
    return next((f"small, {arch}" for text in texts if text in name), None)


# --- the model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model properties that type rules depend on.

    ``n_layer`` includes the MTP layers; heads are those of layer 0.
    """

    arch: str
    n_layer: int
    n_expert: int = 0
    n_head: int = 0
    n_head_kv: int = 0
    #: Whether llama.cpp treats the model as a 70B.
    is_70b: bool = False
    #: Whether there is an output.weight; otherwise token_embd.weight is also the output (tied).
    has_output: bool = True
    #: The number of tensors that are attn_v or attn_qkv (or attn_kv_b, in llama.cpp).
    n_attention_wv: int = 0
    #: Whether ik_llama.cpp treats the model as an 8B or a 70B; tokens in its vocabulary. Only ik's rules use them.
    is_8b_or_70b: bool = False
    n_vocab: int = 0

    @property
    def n_gqa(self) -> int:
        """Heads per KV head in layer 0; 0 if it has none."""
        return self.n_head // self.n_head_kv if self.n_head_kv else 0

    @classmethod
    def from_metadata(cls, metadata: Metadata, tensors: Iterable[TensorLike], *, ik: bool = False) -> ModelFacts:
        """Read the facts from GGUF keys, as llama.cpp's load_hparams does, or ik_llama.cpp's llm_load_hparams.

        ``metadata`` gives a key's value or None (a mapping, or GGUFFile.get). With --prune-layers, pass the *source's*
        metadata (llama-quantize counts its layers) and the remaining tensors.
        """
        get = metadata if callable(metadata) else metadata.get
        names = [t.name for t in tensors]
        wv = ("attn_v.weight", "attn_qkv.weight")
        arch = str(get("general.architecture") or "")

        def number(key: str, default: int = 0) -> int:
            return _scalar(f"{arch}.{key}", get(f"{arch}.{key}"), default)

        # llama-quantize does not read these facts from multimodal projectors.
        is_clip = arch == "clip"
        n_layer = 0 if is_clip else number("block_count", 1 + max(map(layer_of, names), default=-1))
        n_head = 0 if is_clip else number("attention.head_count")
        n_head_kv = 0 if is_clip else number("attention.head_count_kv", n_head)
        n_expert = 0 if is_clip else number("expert_count")
        n_body = n_layer - number("nextn_predict_layers")
        multi_head, has_output = n_head == n_head_kv, "output.weight" in names
        if not ik:
            return cls(
                arch=arch,
                n_layer=_n_layer_all(arch, n_layer, n_body, number("num_loops", 1)),
                n_expert=n_expert,
                n_head=n_head,
                n_head_kv=n_head_kv,
                is_70b=_is_70b(arch, n_body, n_expert, multi_head),
                has_output=has_output,
                n_attention_wv=sum(category(name) in ATTN_V_LIKE for name in names),
            )
        n_vocab = number("vocab_size", len(get("tokenizer.ggml.tokens") or ()))
        if arch in _MLA_IK and n_head_kv == 1:
            n_head_kv = n_head  # ik_llama.cpp reverts llama.cpp's MLA conversion, which has one KV head
        size = _size_ik(arch, n_layer, n_expert, n_vocab, number("embedding_length"), multi_head)
        return cls(
            arch=arch,
            n_layer=n_layer,
            n_expert=n_expert,
            n_head=n_head,
            n_head_kv=n_head_kv,
            is_70b=size == "70B",
            has_output=has_output and arch not in _NO_OUTPUT_IK,
            n_attention_wv=sum(any(text in name for text in wv) for name in names),
            is_8b_or_70b=size is not None,
            n_vocab=n_vocab,
        )


def _scalar(key: str, value: Any, default: int) -> int:
    """Return a GGUF value as a number; for an array per layer its first element, as n_gqa() does."""
    if hasattr(value, "__len__") and not isinstance(value, str | bytes):
        value = value[0] if len(value) else None
    if value is None:
        return default
    try:
        return int(value)
    except (ValueError, OverflowError):
        raise FormatError(
            f"metadata key {key} is {value!r}, not a number; correct it with --override-kv", "QK-E123"
        ) from None


def _n_layer_all(arch: str, n_layer: int, n_body: int, n_loops: int) -> int:
    """Return the layers; two architectures have more than block_count: one for a router, or one set per loop."""
    if arch == "graniteswitch":
        return n_body + 1
    if arch == "nanbeige" and n_loops > 1:
        return n_body * n_loops
    return n_layer


def _is_70b(arch: str, n_body: int, n_expert: int, multi_head: bool) -> bool:
    if arch in ("llama", "llama-embed"):
        return n_body == 80 and n_expert != 8 and not multi_head
    return n_body == {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}.get(arch)


#: Architectures whose single KV head ik_llama.cpp replaces by as many as there are heads.
_MLA_IK = ("deepseek2", "mistral4", "glm-dsa")


#: Architectures for which ik_llama.cpp has no output.weight: if present, it gets the base type, and token_embd is
#: treated as the output (src/llama-model.cpp, LLM_TENSOR_NAMES).
_NO_OUTPUT_IK = frozenset({
    "gptj", "bert", "nomic-bert", "jina-bert-v2", "gemma", "gemma2", "gemma4-assistant", "gemma4_mtp", "command-r",
    "openelm", "bitnet", "cohere2", "clip",
})  # fmt: skip


def _size_ik(arch: str, n_layer: int, n_expert: int, n_vocab: int, n_embd: int, multi_head: bool) -> str | None:
    """Return "8B" or "70B" if ik_llama.cpp classifies a model as such, by its layers (src/llama-hparams.cpp)."""
    if arch == "llama":
        eight = n_layer == 36 or (n_layer == 32 and n_vocab >= 40000 and n_vocab != 49152)
        seventy = n_layer == 80 and not multi_head
        if n_expert == 8:
            return None
        if eight:
            return "8B"
        return "70B" if seventy else None
    if arch in ("qwen3", "qwen3vl"):
        return "8B" if n_layer == 36 and n_embd != 2560 else None
    layers = {"deci": (80, "70B"), "qwen2": (80, "70B"), "olmo": (80, "70B"), "cohere2": (32, "8B"),
              "mistral3": (34, "8B")}  # fmt: skip
    n, size = layers.get(arch, (-1, ""))
    return size if n == n_layer else None
