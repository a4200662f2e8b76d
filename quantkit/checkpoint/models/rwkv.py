"""RWKV 6 and 7, and Qwens with their time mixing in place of attention.

RWKV 7 is exported as flash-linear-attention names it, which transformers loads with that package.

Facts of llama.cpp b11434, conversion/rwkv.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.config import MAX_JSON, Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Multiplied, Shaped, Transposed, size_of, stack, take
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, prefixed
from quantkit.checkpoint.rules import Rename, squeeze
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_sentencepiece_or_bpe
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import CONTROL, MAX_PADDING, MAX_TOKENS, NORMAL, UNUSED, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole

#: One spelling for those of several implementations.
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
            return self._mixed(tensor, context)
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

    def _mixed(self, tensor: Tensor, context: Context) -> Iterable[Tensor]:
        parts = "rwkvag" if context.config.get("wkv_has_gate", True) else "rwkva"
        name = f"blk.{tensor.layer}.time_mix_lerp_fused.weight"
        if ".attention.x_x" in tensor.name:
            shape = (len(parts), 1, 1, size_of(tensor.x) // len(parts))
            return (replace(tensor, x=Shaped(tensor.x, shape), name_in_file=name),)
        pending = context.waiting.setdefault((id(self), tensor.layer or 0), {})
        pending[tensor.name.rpartition("x_")[2]] = tensor
        return (_fuse_vectors(pending, list(parts), tensor),) if len(pending) == len(parts) else ()

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
            return ()  # files have those of the rates twice there, and no use of them
        if not hybrid:
            return (replace(tensor, name=f"{stem}{low_rank[1]}{_LOW_RANK_NAMES[low_rank[2]]}"),)
        x = _as_vector(x) if low_rank[2] == "0" else Transposed(x)
        return (replace(tensor, name=stem + kind, x=x),)


def set_7_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of RWKV 7."""
    inner = config["intermediate_size"]
    _set_sizes(keys, config, layers)
    keys.f32(".attention.layer_norm_epsilon", config.find("layer_norm_epsilon", "norm_eps"))
    keys.u32(".wkv.head_size", config.find("head_size", "head_dim"))
    for key, names, power, factor in (
        ("decay", ("lora_rank_decay", "decay_low_rank_dim"), 0.5, 1.8),
        ("iclr", ("lora_rank_iclr", "a_low_rank_dim"), 0.5, 1.8),
        ("value_residual_mix", ("lora_rank_value_residual_mix", "v_low_rank_dim"), 0.5, 1.3),
        ("gate", ("lora_rank_gate", "gate_low_rank_dim"), 0.8, 0.6),
    ):
        keys.u32(f".attention.{key}_lora_rank", _rank(config, names, power, factor))
    keys.u32(".feed_forward_length", 4 * config.number("hidden_size") if inner is None else inner)
    keys.u32("general.file_type", file_type)
    keys.u32(".attention.head_count", 0)


def _tensor_name(tensor: Tensor, context: Context) -> str:
    """Return the name that the map has for a tensor; parameters without an ending get one."""
    name = context.name_in_file(tensor)
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def _fuse_vectors(vectors: dict[str, Tensor], names: list[str], last: Tensor) -> Tensor:
    """Return single vectors as one tensor [n, 1, 1, width]."""
    xs = [vectors.pop(name).x for name in names]
    x = stack([Shaped(item, (1, 1, size_of(item))) for item in xs])
    return replace(last, x=x, name_in_file=f"blk.{last.layer}.time_mix_lerp_fused.weight")


MIX_ORDER = ("w", "k", "v", "r", "g")
#: Of the Qwens: the order in which those five are stored.
QWEN_ORDER = (3, 1, 2, 0, 4)


@dataclass(frozen=True)
class ConvertMixing6(Rule):
    """Rename and transpose the tensors of RWKV 6; ``reordered``: permute the five parts of time_maa_w1 and _w2."""

    reordered: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        name = _tensor_name(tensor, context)
        kind = name.partition(".time_mix_")[2]
        if kind.startswith("lerp_") and kind != "lerp_x.weight" and tensor.layer is not None:
            parts = context.waiting.setdefault((id(self), tensor.layer), {})
            parts[kind] = tensor
            names = [f"lerp_{item}.weight" for item in MIX_ORDER]
            return (_fuse_vectors(parts, names, tensor),) if len(parts) == len(names) else ()
        return (replace(tensor, x=self._changed(tensor, kind, name, context), name_in_file=name),)

    def _changed(self, tensor: Tensor, kind: str, name: str, context: Context) -> Expression:
        x = tensor.x
        if kind in ("w1.weight", "w2.weight", "decay_w1.weight", "decay_w2.weight"):
            x = Transposed(x)
        if kind == "decay.weight" or "lerp" in name:
            x = squeeze(tensor, context)
        period = context.config.get("rescale_every", 0)
        if period > 0 and name.endswith(("time_mix_output.weight", "channel_mix_value.weight")):
            halved = (tensor.layer or 0) // period
            x = Multiplied(x, 0.5**halved) if halved else x
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
            doubled = (tensor.layer or 0) // period
            x = Multiplied(x, 2.0**doubled) if doubled else x
        name = stem if dot and last.startswith("time_") else tensor.name
        return (replace(tensor, name=name, x=x),)


def _set_sizes(keys: Keys, config: Config, layers: int) -> None:
    keys.u32(".context_length", 1 << 20)
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".block_count", layers)


def set_6_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of RWKV 6."""
    width = config.number("hidden_size")
    inner = config["intermediate_size"]
    _set_sizes(keys, config, layers)
    keys.f32(".attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    keys.u32(".rescale_every_n_layers", config["rescale_every"])
    keys.u32(".wkv.head_size", config["head_size"])
    keys.u32(".time_mix_extra_dim", 64 if width == 4096 else 32)
    keys.u32(".time_decay_extra_dim", 128 if width == 4096 else 64)
    keys.u32(".feed_forward_length", int((width * 3.5) // 32 * 32) if inner is None else inner)
    keys.u32("general.file_type", file_type)
    keys.u32(".attention.head_count", 0)


def set_6_qwen_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of a Qwen 2 with RWKV 6."""
    width, wide = config.number("hidden_size"), config.number("hidden_size") >= 4096
    _set_sizes(keys, config, layers)
    keys.u32(".wkv.head_size", width // max(1, config.number("num_attention_heads")))
    keys.u32(".time_mix_extra_dim", config.get("lora_rank_tokenshift", 64 if wide else 32))
    keys.u32(".time_decay_extra_dim", config.get("lora_rank_decay", 128 if wide else 64))
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32("general.file_type", file_type)
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    keys.u32(".token_shift_count", 1)
    keys.u32(".attention.head_count_kv", config["num_key_value_heads"])
    keys.u32(".attention.head_count", 0)


def _rank(config: Config, names: tuple[str, str], power: float, factor: float) -> int:
    """Return the rank of a pair of matrices; where it is null, as their code computes it of the width."""
    rank = config[names[0]] if names[0] in config else config[names[1]]
    width = config.number("hidden_size")
    return max(1, round(width**power * factor / 32)) * 32 if rank is None else int(rank)


def set_7_hybrid_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of a Qwen 2 with RWKV 7; FormatError for another version."""
    if config["wkv_version"] != 7:
        raise FormatError(f"{config.path}: wkv_version is {short(config['wkv_version'])}; only 7 is known", "QK-E305")
    _set_sizes(keys, config, layers)
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    keys.u32(".wkv.head_size", config["head_size"])
    ranks = {"decay": 64, "iclr": 64, "value_residual_mix": 32, "gate": 128 if config["wkv_has_gate"] else 0}
    for key, rank in ranks.items():
        keys.u32(f".attention.{key}_lora_rank", rank)
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32("general.file_type", file_type)
    keys.u32(".token_shift_count", 1)
    keys.u32(".attention.head_count", 0)


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
        raise FormatError(f"{path}: line {number} is no token with its length: {short(line)}", "QK-E114") from None
    return repr(token)[2:-1]


def write_rwkv(v: Vocabulary) -> None:
    """Bytes, of the longest token that fits; two new lines end a turn (TextModel._set_vocab_rwkv_world)."""
    path = v.folder / _RWKV
    if not path.exists():
        raise FormatError(f"{v.folder}: it has no {_RWKV}, so there is no vocabulary", "QK-E114")
    v.source = f"how {path.name} splits a text stands in a program beside it"
    lines = read_whole(path, MAX_JSON).decode().removesuffix("\n").split("\n")
    tokens = ["<s>", *(_rwkv_text(path, number, line) for number, line in enumerate(lines, 1))]
    size = v.config.get("vocab_size", 65536)
    if not isinstance(size, int) or not len(tokens) <= size <= min(MAX_TOKENS, len(tokens) + MAX_PADDING):
        raise FormatError(
            f"{path}: it has {len(tokens)} tokens, and vocab_size of config.json is {short(size)}", "QK-E114"
        )
    v.keys.text("tokenizer.ggml.model", "rwkv")
    v.keys.array("tokenizer.ggml.tokens", tokens + [f"[PAD{i}]" for i in range(len(tokens), size)])
    types = [CONTROL] + [NORMAL] * (len(tokens) - 1) + [UNUSED] * (size - len(tokens))
    v.keys.array("tokenizer.ggml.token_type", types)
    special = special_tokens(v.folder)
    special.template = special.template or "rwkv-world"  # llama.cpp's name of a template of its own
    special.set("eot", 261)
    special.ids |= {"bos": 0, "eos": 0}
    special.write(v.keys)


_RWKV_7 = Architecture("rwkv7", stored=STORED_7, rules=(ConvertMixing7(),), base=set_7_base, vocab=write_rwkv)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "Rwkv6ForCausalLM": Architecture("rwkv6", rules=(ConvertMixing6(),), base=set_6_base, vocab=write_rwkv),
    "RWKV6Qwen2ForCausalLM": Architecture(
        "rwkv6qwen2",
        rules=(ConvertMixing6(reordered=True),),
        base=set_6_qwen_base,
        vocab=write_sentencepiece_or_bpe,
    ),
    "Rwkv7ForCausalLM": _RWKV_7,
    "RWKV7ForCausalLM": _RWKV_7,
    "RwkvHybridForCausalLM": replace(_RWKV_7, arch="arwkv7", base=set_7_hybrid_base, vocab=write_sentencepiece_or_bpe),
}

_RWKV_LAYER = "rwkv.blocks.*."


def _as_vector(x: Expression) -> Expression:
    """Return mixing weights of shape [n] as RWKV stores them, [1, 1, n]."""
    return Shaped(x, (1, 1, size_of(x)))


def _split_vectors(x: Expression, names: Sequence[str], tensor: Tensor) -> list[Tensor]:
    """Return the vectors of one tensor, each by its name."""
    return [replace(tensor, name=name, x=_as_vector(take(x, 0, range(i, i + 1)))) for i, name in enumerate(names)]


_TIME_NAMES = "time_maa_x time_maa_w1 time_maa_w2 time_decay time_decay_w1 time_decay_w2 time_faaaa"


def _set_heads(meta: ModelMetadata, config: Json) -> None:
    """Set the number of heads, which follows from their width, and ranks."""
    config["num_attention_heads"] = meta.number(".embedding_length") // max(1, meta.number(".wkv.head_size"))
    config |= {
        "lora_rank_tokenshift": meta.number(".time_mix_extra_dim"),
        "lora_rank_decay": meta.number(".time_decay_extra_dim"),
    }


def _set_ranks(meta: ModelMetadata, config: Json) -> None:
    """Set the ranks of low-rank matrices."""
    for name, key in (("decay", "decay"), ("a", "iclr"), ("v", "value_residual_mix"), ("gate", "gate")):
        config[f"{name}_low_rank_dim"] = meta.get(f".attention.{key}_lora_rank")
    config |= {"norm_first": True, "norm_bias": True, "attn": None}


_MIX_NAMES_7 = " ".join(f"{item}{n}" for item in "wav" for n in (0, 1, 2)) + " g1 g2 k_k k_a r_k"


def _set_hybrid(meta: ModelMetadata, config: Json) -> None:
    """Set whether there are gates and head norms, and the number of heads."""
    config |= {
        "wkv_version": 7,
        "wkv_has_gate": meta.has_in_any_layer(".time_mix_g1.weight"),
        "wkv_has_group_norm": meta.has_in_any_layer(".time_mix_ln.weight"),
        "num_attention_heads": meta.number(".embedding_length") // max(1, meta.number(".wkv.head_size")),
    }


_RWKV_6_CLASS = HfClass(
    "rwkv6",
    "rwkv.embeddings rwkv.blocks.0.pre_ln rwkv.ln_out head "
    + prefixed(f"{_RWKV_LAYER}attention.", f"{_TIME_NAMES} receptance key value output gate ln_x")
    + " "
    + prefixed(
        _RWKV_LAYER,
        "ln1 ln2 feed_forward.time_maa_k feed_forward.time_maa_r feed_forward.key feed_forward.receptance "
        "feed_forward.value",
    ),
    kinds={"*time_mix_lerp_fused": f"{_RWKV_LAYER}attention.time_maa_fused"},
    keys={
        ".context_length": "max_context_length",
        ".attention.head_count": "",
        ".wkv.head_size": "head_size",
        ".rescale_every_n_layers": "rescale_every",
        ".attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    defaults={"rescale_every": 0},
)

_RWKV_6_QWEN_CLASS = HfClass(
    "rwkv6qwen2",
    prefixed(f"{LAYER}self_attn.", f"{_TIME_NAMES} q_proj k_proj v_proj o_proj gate"),
    kinds={"*time_mix_lerp_fused": f"{LAYER}self_attn.time_maa_fused"},
    keys={".context_length": "max_context_length", ".attention.head_count": ""},
    config_setters=(_set_heads,),
)

_RWKV_7_CLASS = HfClass(
    "rwkv7",
    "model.embeddings model.norm model.layers.0.pre_norm "
    + prefixed(
        LAYER,
        "attn_norm ln2 feed_forward.key feed_forward.value feed_forward.x_k",
    )
    + " "
    + prefixed(f"{LAYER}attention.", f"{_MIX_NAMES_7} r_proj k_proj v_proj o_proj ln_x"),
    kinds={"*time_mix_lerp_fused": f"{LAYER}attention.x_fused", "*attn_norm": f"{LAYER}attn_norm"},
    keys={
        ".context_length": "",
        ".attention.head_count": "",
        ".wkv.head_size": "head_dim",
        ".attention.layer_norm_epsilon": "norm_eps",
    },
    config_setters=(_set_ranks,),
    renames=(
        (r"\.ln2\.", ".ffn_norm."),
        (r"\.feed_forward\.x_k\.weight$", ".ffn.x_k"),
        (r"\.feed_forward\.", ".ffn."),
        (r"\.attention\.ln_x\.", ".attn.g_norm."),
        (r"\.attn\.ln_x\.", ".attn.g_norm."),
    ),
)

_RWKV_7_HYBRID_CLASS = HfClass(
    "rwkv_hybrid",
    prefixed(f"{LAYER}attention.", f"{_MIX_NAMES_7} receptance key value output ln_x"),
    kinds={"*time_mix_lerp_fused": f"{LAYER}attention.x_fused"},
    keys={".context_length": "", ".attention.head_count": "", ".wkv.head_size": "head_size"},
    config_setters=(_set_hybrid,),
    renames=((r"\.attention\.ln_x\.bias$", ".self_attn.time_mixer.ln_x.bias"),),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "Rwkv6ForCausalLM": _RWKV_6_CLASS,
    "RWKV6Qwen2ForCausalLM": _RWKV_6_QWEN_CLASS,
    "RWKV7ForCausalLM": _RWKV_7_CLASS,
    "RwkvHybridForCausalLM": _RWKV_7_HYBRID_CLASS,
}
