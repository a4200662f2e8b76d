"""RWKV 6 and 7, and Qwens with their time mixing in place of attention (conversion/rwkv.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Multiplied, Shaped, Transposed, size_of, stacked, taken
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.tensors import Context, Renamed, Tensor, squeezed
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def _in_file(tensor: Tensor, context: Context) -> str:
    """Return the name that the map has for a tensor; parameters without an ending get one."""
    found = context.names.find(tensor.name)
    if found is None:
        raise context.fail(tensor, "this architecture has no such tensor; nothing is left out silently")
    return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def _fused(held: dict[str, Tensor], names: list[str], last: Tensor) -> Tensor:
    """Return single vectors as one tensor [n, 1, 1, width]."""
    xs = [held.pop(name).x for name in names]
    x = stacked([Shaped(each, (1, 1, size_of(each))) for each in xs])
    return replace(last, x=x, name_in_file=f"blk.{last.layer}.time_mix_lerp_fused.weight")


# --- RWKV 6 ----------------------------------------------------------------------------------------------------------

MIXED = ("w", "k", "v", "r", "g")
#: Of the Qwens: the order in which those five are stored.
QWEN_ORDER = (3, 1, 2, 0, 4)


@dataclass(frozen=True)
class Mixing6:
    """Names, and what is stored the other way round; ``reordered``: the five parts of two matrices are."""

    reordered: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        name = _in_file(tensor, context)
        kind = name.partition(".time_mix_")[2]
        if kind.startswith("lerp_") and kind != "lerp_x.weight" and tensor.layer is not None:
            held = context.held.setdefault((id(self), tensor.layer), {})
            held[kind] = tensor
            names = [f"lerp_{each}.weight" for each in MIXED]
            return (_fused(held, names, tensor),) if len(held) == len(names) else ()
        return (replace(tensor, x=self._changed(tensor, kind, name, context), name_in_file=name),)

    def _changed(self, tensor: Tensor, kind: str, name: str, context: Context) -> Expression:
        x = tensor.x
        if kind in ("w1.weight", "w2.weight", "decay_w1.weight", "decay_w2.weight"):
            x = Transposed(x)
        if kind == "decay.weight" or "lerp" in name:
            x = squeezed(tensor, context)
        every = context.config.get("rescale_every", 0)
        if every > 0 and name.endswith(("time_mix_output.weight", "channel_mix_value.weight")):
            halved = (tensor.layer or 0) // every
            x = Multiplied(x, 0.5**halved) if halved else x
        if self.reordered and kind in ("w1.weight", "w2.weight"):
            whole = (5, size_of(x) // 5 // x.shape[-1], x.shape[-1])
            parts = taken(Shaped(x, whole), 0, *(range(i, i + 1) for i in QWEN_ORDER))
            x = parts if kind == "w2.weight" else Shaped(parts, (whole[0] * whole[1], whole[2]))
        return x


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


# --- RWKV 7 ----------------------------------------------------------------------------------------------------------

#: One spelling for those of several implementations.
STORED_7 = (
    Renamed(r"blocks", "layers", foreign=True),
    Renamed(r"ffn", "feed_forward", foreign=True),
    Renamed(r"self_attn", "attention", foreign=True),
    Renamed(r"attn", "attention", foreign=True),
    Renamed(r"time_mixer\.", "", foreign=True),
    Renamed(r"feed_forward_norm", "ln2", foreign=True),
    Renamed(r"g_norm", "ln_x", foreign=True),
)
_LOW_RANK = {"_lora.lora.0.weight": "1.weight", "_lora.lora.2.weight": "2.weight", "_lora.lora.2.bias": "0.weight"}


@dataclass(frozen=True)
class Mixing7:
    """Names, what is stored the other way round, and what the first layer has of no use."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        first, low_rank = tensor.layer == 0, "_lora.lora" in tensor.name
        if low_rank:
            context.config.values["_low_rank"] = True
        for old, new in _LOW_RANK.items():
            tensor = replace(tensor, name=tensor.name.replace(old, new))
        if tensor.layer is not None and ".attention.x_" in tensor.name:
            return self._mixed(tensor, context)
        name = _in_file(tensor, context)
        if first and ".attention.v" in tensor.name and "value" not in name:
            return ()
        kind, x = name.partition(".time_mix_")[2], squeezed(tensor, context)
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
        held = context.held.setdefault((id(self), tensor.layer or 0), {})
        held[tensor.name.rpartition("x_")[2]] = tensor
        return (_fused(held, list(parts), tensor),) if len(held) == len(parts) else ()


def _rank(config: Config, names: tuple[str, str], power: float, factor: float) -> int:
    """Return the rank of a pair of matrices; where it is null, as their code computes it of the width."""
    found = config[names[0]] if names[0] in config else config[names[1]]
    width = config.number("hidden_size")
    return max(1, round(width**power * factor / 32)) * 32 if found is None else int(found)


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


def set_7_hybrid_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of a Qwen 2 with RWKV 7; FormatError for another version."""
    if config["wkv_version"] != 7:
        raise FormatError(f"{config.path}: wkv_version is {short(config['wkv_version'])}; only 7 is known")
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
