"""RWKV 6 and 7, and Qwens with their time mixing in place of attention.

RWKV 7 is exported with the names of flash-linear-attention, which transformers loads with that package.

Facts of llama.cpp b11434, conversion/rwkv.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.config import MAX_JSON, Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Multiplied, Shaped, Transposed, size_of, stack, take
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, Always, Computed, Copied, SetKeys, divided_head_dim
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, squeeze
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_sentencepiece_or_bpe
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import CONTROL, MAX_PADDING, MAX_TOKENS, NORMAL, UNUSED, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole

#: One spelling for the names of several implementations.
STORED_7 = (
    Rename(r"blocks", "layers", foreign=True),
    Rename(r"ffn", "feed_forward", foreign=True),
    Rename(r"self_attn", "attention", foreign=True),
    Rename(r"attn", "attention", foreign=True),
    Rename(r"time_mixer\.", "", foreign=True),
    Rename(r"feed_forward_norm", "ln2", foreign=True),
    Rename(r"g_norm", "ln_x", foreign=True),
)

_LOW_RANK = {"_lora.lora.0.weight": "1.weight", "_lora.lora.2.weight": "2.weight", "_lora.lora.2.bias": "0.weight"}
_LOW_RANK_NAMES = {"1": "_lora.lora.0.weight", "2": "_lora.lora.2.weight", "0": "_lora.lora.2.bias"}


@dataclass(frozen=True)
class ConvertMixing7(Rule):
    """Rename and transpose the tensors of RWKV 7; drop those that its first layer does not use."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        first, low_rank = tensor.layer == 0, "_lora.lora" in tensor.name
        if low_rank:
            context.config.values["_low_rank"] = True
        for old, new in _LOW_RANK.items():
            tensor = replace(tensor, name=tensor.name.replace(old, new))
        if tensor.layer is not None and ".attention.x_" in tensor.name:
            return self._mix(tensor, context)
        name = _tensor_name(tensor, context)
        if first and ".attention.v" in tensor.name and "value" not in name:
            return ()
        kind, x = name.partition(".time_mix_")[2], squeeze(tensor, context)
        turned = kind[:1] in tuple("wavg") and kind[1:] in ("1.weight", "2.weight")
        if turned and not context.config.get("_low_rank"):
            x = Transposed(x)
        if kind.startswith("r_k"):
            x = Shaped(x, (size_of(x),))
        tensor = replace(tensor, x=x, name_in_file=name)
        if first and kind.startswith("a"):
            return replace(tensor, name_in_file=name.replace("time_mix_a", "time_mix_v")), tensor
        return (tensor,)

    def _mix(self, tensor: Tensor, context: Context) -> Iterable[Tensor]:
        parts = "rwkvag" if context.config.get("wkv_has_gate", True) else "rwkva"
        name = f"blk.{tensor.layer}.time_mix_lerp_fused.weight"
        if ".attention.x_x" in tensor.name:
            shape = (len(parts), 1, 1, size_of(tensor.x) // len(parts))
            return (replace(tensor, x=Shaped(tensor.x, shape), name_in_file=name),)
        vectors = context.gather(self, tensor.layer or 0, tensor.name.rpartition("x_")[2], tensor, len(parts))
        return () if vectors is None else (_fuse_vectors(vectors, list(parts), tensor),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Split the fused mix vectors, and restore the shapes of single parameters."""
        match = re.fullmatch(r"(model\.layers\.\d+\.)attention\.(\w+)\.weight", tensor.name)
        hybrid = context.config.get("model_type") == "rwkv_hybrid"
        if match is None:
            return None
        stem = match[1] + ("self_attn.time_mixer." if hybrid else "attn.")
        kind, x = match[2], tensor.x
        if kind == "x_fused":
            return _split_vectors(x, [f"{stem}x_{item}" for item in ("rwkvag" if x.shape[0] == 6 else "rwkva")], tensor)
        if kind == "r_k":
            heads = size_of(x) // max(1, context.config.number("head_size" if hybrid else "head_dim"))
            return (replace(tensor, name=f"{stem}r_k", x=Shaped(x, (heads, size_of(x) // max(1, heads)))),)
        if kind in ("k_k", "k_a"):
            return (replace(tensor, name=stem + kind, x=_as_vector(x) if hybrid else x),)
        low_rank = re.fullmatch(r"([wavg])([012])", kind)
        if low_rank is None:
            return (replace(tensor, name=f"{stem}{kind}.weight"),)
        if tensor.layer == 0 and low_rank[1] == "v":
            return ()  # files contain those of the rates twice there, unused
        if not hybrid:
            return (replace(tensor, name=f"{stem}{low_rank[1]}{_LOW_RANK_NAMES[low_rank[2]]}"),)
        x = _as_vector(x) if low_rank[2] == "0" else Transposed(x)
        return (replace(tensor, name=stem + kind, x=x),)


def _sizes(context: str = "") -> tuple[SetKeys, ...]:
    """Return the rows of common sizes; ``context``: the name in config.json of the context length, which files do not
    limit."""
    return (
        Computed(".context_length", lambda config: 1 << 20, names=context),
        Copied(".embedding_length", "hidden_size", required=True),
        BLOCK_COUNT,
    )


def _width_7(config: Config) -> int:
    inner: int | None = config["intermediate_size"]
    return 4 * config.number("hidden_size") if inner is None else inner


def _rank_row(key: str, names: tuple[str, str], power: float, factor: float) -> Computed:
    return Computed(f".attention.{key}_lora_rank", lambda config: _rank(config, names, power, factor), names=names[1])


_NO_HEADS = Always(".attention.head_count", 0)
_HEAD_SIZE = Copied(".wkv.head_size", "head_size", required=True)
_ONE_SHIFT = Always(".token_shift_count", 1)
_RMS_EPSILON = Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", required=True)
_FEED_FORWARD = Copied(".feed_forward_length", "intermediate_size", required=True)

BASE_7: tuple[SetKeys, ...] = (
    *_sizes(),
    Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon norm_eps", "f32", required=True, exported="norm_eps"),
    Copied(".wkv.head_size", "head_size head_dim", required=True, exported="head_dim"),
    _rank_row("decay", ("lora_rank_decay", "decay_low_rank_dim"), 0.5, 1.8),
    _rank_row("iclr", ("lora_rank_iclr", "a_low_rank_dim"), 0.5, 1.8),
    _rank_row("value_residual_mix", ("lora_rank_value_residual_mix", "v_low_rank_dim"), 0.5, 1.3),
    _rank_row("gate", ("lora_rank_gate", "gate_low_rank_dim"), 0.8, 0.6),
    Computed(".feed_forward_length", _width_7, names="intermediate_size"),
    FILE_TYPE,
    _NO_HEADS,
)


def _tensor_name(tensor: Tensor, context: Context) -> str:
    """Return the name that the map has for a tensor; parameters without an ending get one."""
    name = context.name_in_file(tensor)
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def _fuse_vectors(vectors: dict[str, Tensor], names: list[str], last: Tensor) -> Tensor:
    """Return single vectors as one tensor [n, 1, 1, width]."""
    xs = [vectors[name].x for name in names]
    x = stack([Shaped(item, (1, 1, size_of(item))) for item in xs])
    return replace(last, x=x, name_in_file=f"blk.{last.layer}.time_mix_lerp_fused.weight")


MIX_ORDER = ("w", "k", "v", "r", "g")
#: In Qwen-based models: the order in which the five are stored.
QWEN_ORDER = (3, 1, 2, 0, 4)


@dataclass(frozen=True)
class ConvertMixing6(Rule):
    """Rename and transpose the tensors of RWKV 6; ``reordered``: permute the five parts of time_maa_w1 and _w2."""

    reordered: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        name = _tensor_name(tensor, context)
        kind = name.partition(".time_mix_")[2]
        if kind.startswith("lerp_") and kind != "lerp_x.weight" and tensor.layer is not None:
            names = [f"lerp_{item}.weight" for item in MIX_ORDER]
            parts = context.gather(self, tensor.layer, kind, tensor, len(names))
            return () if parts is None else (_fuse_vectors(parts, names, tensor),)
        return (replace(tensor, x=self._change(tensor, kind, name, context), name_in_file=name),)

    def _change(self, tensor: Tensor, kind: str, name: str, context: Context) -> Expression:
        x = tensor.x
        if kind in ("w1.weight", "w2.weight", "decay_w1.weight", "decay_w2.weight"):
            x = Transposed(x)
        if kind == "decay.weight" or "lerp" in name:
            x = squeeze(tensor, context)
        period = context.config.get("rescale_every", 0)
        if period > 0 and name.endswith(("time_mix_output.weight", "channel_mix_value.weight")):
            n_halvings = (tensor.layer or 0) // period
            x = Multiplied(x, 0.5**n_halvings) if n_halvings else x
        if self.reordered and kind in ("w1.weight", "w2.weight"):
            shape = (5, size_of(x) // 5 // x.shape[-1], x.shape[-1])
            parts = take(Shaped(x, shape), 0, *(range(i, i + 1) for i in QWEN_ORDER))
            x = parts if kind == "w2.weight" else Shaped(parts, (shape[0] * shape[1], shape[2]))
        return x

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Split the fused mix vectors, transpose matrices, and undo the division of every few layers."""
        stem, dot, kind = tensor.name.rpartition(".")
        if tensor.name.endswith(".time_maa_fused.weight"):
            return _split_vectors(tensor.x, [f"{stem.removesuffix('fused')}{item}" for item in MIX_ORDER], tensor)
        x, last = tensor.x, stem.rpartition(".")[2]
        if self.reordered and last in ("time_maa_w1", "time_maa_w2"):
            shape = (5, size_of(x) // 5 // x.shape[-1], x.shape[-1])
            order = sorted(range(5), key=QWEN_ORDER.__getitem__)
            x = Shaped(take(Shaped(x, shape), 0, *(range(i, i + 1) for i in order)), x.shape)
        if last in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
            x = Transposed(x)
        elif last == "time_decay" or last.startswith("time_maa_"):
            x = _as_vector(x)
        period = context.config.get("rescale_every", 0)
        if period > 0 and tensor.name.endswith(("attention.output.weight", "feed_forward.value.weight")):
            n_doublings = (tensor.layer or 0) // period
            x = Multiplied(x, 2.0**n_doublings) if n_doublings else x
        name = stem if dot and last.startswith("time_") else tensor.name
        return (replace(tensor, name=name, x=x),)


def _width_6(config: Config) -> int:
    inner: int | None = config["intermediate_size"]
    return int((config.number("hidden_size") * 3.5) // 32 * 32) if inner is None else inner


def _by_width(narrow: int, wide: int) -> Callable[[Config], int]:
    """Return a rank that depends on whether the model's width is 4096."""
    return lambda config: wide if config.number("hidden_size") == 4096 else narrow


BASE_6: tuple[SetKeys, ...] = (
    *_sizes("max_context_length"),
    Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon", "f32", required=True),
    Copied(".rescale_every_n_layers", "rescale_every", required=True),
    _HEAD_SIZE,
    Computed(".time_mix_extra_dim", _by_width(32, 64)),
    Computed(".time_decay_extra_dim", _by_width(64, 128)),
    Computed(".feed_forward_length", _width_6, names="intermediate_size"),
    FILE_TYPE,
    _NO_HEADS,
)


def _set_head_count(meta: ModelMetadata, config: Json) -> None:
    """Set the number of heads, which follows from their width."""
    config["num_attention_heads"] = meta.number(".embedding_length") // max(1, meta.number(".wkv.head_size"))


def _rank_6(name: str, narrow: int, wide: int) -> Callable[[Config], int]:
    return lambda config: config.get(name, wide if config.number("hidden_size") >= 4096 else narrow)


#: Of a Qwen 2 with RWKV 6.
QWEN_BASE_6: tuple[SetKeys, ...] = (
    *_sizes("max_context_length"),
    Computed(".wkv.head_size", divided_head_dim, inverse=_set_head_count),
    Computed(".time_mix_extra_dim", _rank_6("lora_rank_tokenshift", 32, 64), names="lora_rank_tokenshift"),
    Computed(".time_decay_extra_dim", _rank_6("lora_rank_decay", 64, 128), names="lora_rank_decay"),
    _FEED_FORWARD,
    FILE_TYPE,
    _RMS_EPSILON,
    _ONE_SHIFT,
    Copied(".attention.head_count_kv", "num_key_value_heads", required=True),
    _NO_HEADS,
)


def _rank(config: Config, names: tuple[str, str], power: float, factor: float) -> int:
    """Return the rank of a pair of matrices; if null, computed from the width like the original code."""
    rank = config[names[0]] if names[0] in config else config[names[1]]
    width = config.number("hidden_size")
    return max(1, round(width**power * factor / 32)) * 32 if rank is None else int(rank)


def refuse_version(keys: Keys, config: Config) -> None:
    """Refuse versions of RWKV other than 7."""
    if config["wkv_version"] != 7:
        raise FormatError(
            f"{config.path}: wkv_version is {short(config['wkv_version'])}; only 7 is supported", "QK-E305"
        )


#: Of a Qwen 2 with RWKV 7.
QWEN_BASE_7: tuple[SetKeys, ...] = (
    refuse_version,
    *_sizes(),
    _RMS_EPSILON,
    _HEAD_SIZE,
    Always(".attention.decay_lora_rank", 64),
    Always(".attention.iclr_lora_rank", 64),
    Always(".attention.value_residual_mix_lora_rank", 32),
    Computed(".attention.gate_lora_rank", lambda config: 128 if config["wkv_has_gate"] else 0),
    _FEED_FORWARD,
    FILE_TYPE,
    _ONE_SHIFT,
    _NO_HEADS,
)

_RWKV = "rwkv_vocab_v20230424.txt"


def _rwkv_text(path: Path, number: int, line: str) -> str:
    """Return a line of RWKV's vocabulary: number, Python literal, length in bytes."""
    try:
        _, *literal, length = line.split(" ")
        text = ast.literal_eval(" ".join(literal))
        token = text.encode() if isinstance(text, str) else text
        if not isinstance(token, bytes) or len(token) != int(length):
            raise ValueError
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise FormatError(f"{path}: line {number} is not a token with its length: {short(line)}", "QK-E114") from None
    return repr(token)[2:-1]


def write_rwkv(v: Vocabulary) -> None:
    """Write a vocabulary of longest byte matches; two newlines end a turn (TextModel._set_vocab_rwkv_world)."""
    path = v.folder / _RWKV
    if not path.exists():
        raise FormatError(f"{v.folder}: has no {_RWKV}, so the vocabulary is missing", "QK-E114")
    v.source = f"{path.name} needs the checkpoint's own Python code to split text"
    lines = read_whole(path, MAX_JSON).decode().removesuffix("\n").split("\n")
    tokens = ["<s>", *(_rwkv_text(path, number, line) for number, line in enumerate(lines, 1))]
    size = v.config.get("vocab_size", 65536)
    if not isinstance(size, int) or not len(tokens) <= size <= min(MAX_TOKENS, len(tokens) + MAX_PADDING):
        raise FormatError(
            f"{path}: has {len(tokens)} tokens, but vocab_size of config.json is {short(size)}", "QK-E114"
        )
    v.keys.text("tokenizer.ggml.model", "rwkv")
    v.keys.array("tokenizer.ggml.tokens", tokens + [f"[PAD{i}]" for i in range(len(tokens), size)])
    types = [CONTROL] + [NORMAL] * (len(tokens) - 1) + [UNUSED] * (size - len(tokens))
    v.keys.array("tokenizer.ggml.token_type", types)
    special = special_tokens(v.folder)
    special.template = special.template or "rwkv-world"  # llama.cpp's name of a built-in template
    special.set("eot", 261)
    special.ids |= {"bos": 0, "eos": 0}
    special.write(v.keys)


_RWKV_7 = Architecture("rwkv7", stored=STORED_7, rules=(ConvertMixing7(),), base=BASE_7, vocab=write_rwkv)

ARCHITECTURES: dict[str, Architecture] = {
    "Rwkv6ForCausalLM": Architecture("rwkv6", rules=(ConvertMixing6(),), base=BASE_6, vocab=write_rwkv),
    "RWKV6Qwen2ForCausalLM": Architecture(
        "rwkv6qwen2",
        rules=(ConvertMixing6(reordered=True),),
        base=QWEN_BASE_6,
        vocab=write_sentencepiece_or_bpe,
    ),
    "Rwkv7ForCausalLM": _RWKV_7,
    "RWKV7ForCausalLM": _RWKV_7,
    "RwkvHybridForCausalLM": replace(_RWKV_7, arch="arwkv7", base=QWEN_BASE_7, vocab=write_sentencepiece_or_bpe),
}

_RWKV_LAYER = "rwkv.blocks.*."


def _as_vector(x: Expression) -> Expression:
    """Return mixing weights of shape [n] as RWKV stores them, [1, 1, n]."""
    return Shaped(x, (1, 1, size_of(x)))


def _split_vectors(x: Expression, names: Sequence[str], tensor: Tensor) -> list[Tensor]:
    """Return the vectors of one tensor, each by its name."""
    return [replace(tensor, name=name, x=_as_vector(take(x, 0, range(i, i + 1)))) for i, name in enumerate(names)]


_TIME_NAMES = "time_maa_x time_maa_w1 time_maa_w2 time_decay time_decay_w1 time_decay_w2 time_faaaa"


def _set_norms(meta: ModelMetadata, config: Json) -> None:
    config |= {"norm_first": True, "norm_bias": True, "attn": None}


_MIX_NAMES_7 = " ".join(f"{item}{n}" for item in "wav" for n in (0, 1, 2)) + " g1 g2 k_k k_a r_k"


def _set_hybrid(meta: ModelMetadata, config: Json) -> None:
    """Set whether there are gates and head norms, and the number of heads."""
    _set_head_count(meta, config)
    config |= {
        "wkv_version": 7,
        "wkv_has_gate": meta.has_in_any_layer(".time_mix_g1.weight"),
        "wkv_has_group_norm": meta.has_in_any_layer(".time_mix_ln.weight"),
    }


CLASSES: dict[str, HfClass] = {
    "Rwkv6ForCausalLM": HfClass(
        "rwkv6",
        "rwkv.embeddings rwkv.blocks.0.pre_ln rwkv.ln_out head "
        + add_prefix(f"{_RWKV_LAYER}attention.", f"{_TIME_NAMES} receptance key value output gate ln_x")
        + " "
        + add_prefix(
            _RWKV_LAYER,
            "ln1 ln2 feed_forward.time_maa_k feed_forward.time_maa_r feed_forward.key feed_forward.receptance "
            "feed_forward.value",
        ),
        kinds={"*time_mix_lerp_fused": f"{_RWKV_LAYER}attention.time_maa_fused"},
        defaults={"rescale_every": 0},
    ),
    "RWKV6Qwen2ForCausalLM": HfClass(
        "rwkv6qwen2",
        add_prefix(f"{LAYER}self_attn.", f"{_TIME_NAMES} q_proj k_proj v_proj o_proj gate"),
        kinds={"*time_mix_lerp_fused": f"{LAYER}self_attn.time_maa_fused"},
    ),
    "RWKV7ForCausalLM": HfClass(
        "rwkv7",
        "model.embeddings model.norm model.layers.0.pre_norm "
        + add_prefix(
            LAYER,
            "attn_norm ln2 feed_forward.key feed_forward.value feed_forward.x_k",
        )
        + " "
        + add_prefix(f"{LAYER}attention.", f"{_MIX_NAMES_7} r_proj k_proj v_proj o_proj ln_x"),
        kinds={"*time_mix_lerp_fused": f"{LAYER}attention.x_fused", "*attn_norm": f"{LAYER}attn_norm"},
        config_setters=(_set_norms,),
        renames=(
            (r"\.ln2\.", ".ffn_norm."),
            (r"\.feed_forward\.x_k\.weight$", ".ffn.x_k"),
            (r"\.feed_forward\.", ".ffn."),
            (r"\.attention\.ln_x\.", ".attn.g_norm."),
            (r"\.attn\.ln_x\.", ".attn.g_norm."),
        ),
    ),
    "RwkvHybridForCausalLM": HfClass(
        "rwkv_hybrid",
        add_prefix(f"{LAYER}attention.", f"{_MIX_NAMES_7} receptance key value output ln_x"),
        kinds={"*time_mix_lerp_fused": f"{LAYER}attention.x_fused"},
        config_setters=(_set_hybrid,),
        renames=((r"\.attention\.ln_x\.bias$", ".self_attn.time_mixer.ln_x.bias"),),
    ),
}
