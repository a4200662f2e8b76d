"""The names that a loader's table uses: fields, constants, and llama_hparams' functions of a layer.

Source: src/llama-hparams.cpp of llama.cpp b11434, src/llama-hparams.h of ik_llama.cpp 8337e4cd3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

#: Maximum number of layers in an array of hyperparameters.
MAX_LAYERS = 512

_ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}

#: Architectures all of whose layers are recurrent: llm_arch_is_recurrent.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})


class OutOfRange(Exception):
    """A layer that does not exist, at which a loader aborts."""


class Hyperparameters(dict[str, Any]):
    """A namespace for ``eval``."""

    def __init__(self, runtime: str, arch: str, values: Mapping[str, Any]) -> None:
        super().__init__({name: list(v) if isinstance(v, list) else v for name, v in values.items()})
        self.update(_FUNCTIONS)
        # in ik_llama.cpp the function of a layer replaces the latter
        self.update(arch=arch, is_recurrent=arch in RECURRENT)
        for name, function in _BY_LAYER[runtime].items():
            self[name] = _bound(function, self)

    def __missing__(self, name: str) -> Any:
        if name == "n_layer" and "n_layer_all" in self:
            return self["n_layer_all"] - self["n_layer_nextn"]
        raise KeyError(name)


def _bound(function: Callable[..., Any], values: Hyperparameters) -> Callable[..., Any]:
    return lambda *arguments: function(values, *arguments)


def _item(array: str) -> Callable[[Hyperparameters, int], Any]:
    def item(h: Hyperparameters, layer: int) -> Any:
        return _check(h[array], layer, h)

    return item


def _check(values: list[Any], layer: int, h: Hyperparameters) -> Any:
    n_layer = h["n_layer_all"] if "n_layer_all" in h else h["n_layer"]
    if not 0 <= layer < n_layer:
        raise OutOfRange(f"layer {layer} of {n_layer}")
    return values[layer]


def _by_window(full: str, window: str, layers: str) -> Callable[[Hyperparameters, int], int]:
    def width(h: Hyperparameters, layer: int) -> int:
        return int(h[window] if _check(h[layers], layer, h) else h[full])

    return width


_n_head, _n_head_kv = _item("n_head_arr"), _item("n_head_kv_arr")


def _widths(layers: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of heads' widths; ``layers``: the field that lists the layers with a sliding window."""
    head_k = _by_window("n_embd_head_k_full", "n_embd_head_k_swa", layers)
    head_v = _by_window("n_embd_head_v_full", "n_embd_head_v_swa", layers)
    return {
        "n_embd_head_k": head_k,
        "n_embd_head_v": head_v,
        "n_embd_k_gqa": lambda h, i: head_k(h, i) * _n_head_kv(h, i),
        "n_embd_v_gqa": lambda h, i: head_v(h, i) * _n_head_kv(h, i),
        "n_embd_head_k_mla": lambda h: h["n_embd_head_k_mla_impl"] if _is_mla(h) else head_k(h, 0),
        "n_embd_head_v_mla": lambda h: h["n_embd_head_v_mla_impl"] if _is_mla(h) else head_v(h, 0),
    }


def _is_mla(h: Hyperparameters) -> bool:
    return bool(h["n_embd_head_k_mla_impl"] and h["n_embd_head_v_mla_impl"])


def _n_embd_inp(h: Hyperparameters) -> int:
    return int(h["n_embd_inp_impl"] or h["n_embd"] * (1 + h["n_deepstack_layers"]))


def _pattern(h: Hyperparameters, period: int, dense_first: bool = False) -> list[int]:
    """Return the layers with a sliding window: all but one of each period."""
    layers = range(h["n_layer_all"] - h["n_layer_nextn"])
    if dense_first:
        return _pad(period == 0 or i % period != 0 for i in layers)
    return _pad(period == 0 or i % period < period - 1 for i in layers)


def _pad(values: Any) -> list[Any]:
    items = list(values)
    return items + [0] * (MAX_LAYERS - len(items))


#: Functions that both runtimes have.
_COMMON: dict[str, Callable[..., Any]] = {
    "n_head": _n_head,
    "n_head_kv": _n_head_kv,
    "n_ff": _item("n_ff_arr"),
    "n_gqa": lambda h, i=0: _n_head(h, i) // _n_head_kv(h, i) if _n_head_kv(h, i) else 0,
}
_BY_LAYER: dict[str, dict[str, Callable[..., Any]]] = {
    "llama.cpp": {
        **_COMMON,
        **_widths("is_swa_impl"),
        "n_ff_exp": _item("n_ff_exp_arr"),
        "n_expert_used": _item("n_expert_used_arr"),
        "n_expert_used_max": lambda h: max(h["n_expert_used_arr"][: h["n_layer_all"]], default=0),
        "n_rot": _by_window("n_rot_full", "n_rot_swa", "is_swa_impl"),
        "n_embd_out": lambda h: h["n_embd_out_impl"] or h["n_embd"],
        "n_embd_inp": _n_embd_inp,
        "n_embd_inp_enc": lambda h: h["n_embd_inp_enc_impl"] or _n_embd_inp(h),
        "is_swa": _item("is_swa_impl"),
        "is_swa_any": lambda h: any(h["is_swa_impl"][: h["n_layer_all"]]),
        "is_recr": _item("is_recr_impl"),
        "is_ple": _item("is_ple_impl"),
        "is_indexer_full": _item("is_indexer_full_impl"),
        "is_mla": _is_mla,
        "has_kv": lambda h, i: h["n_layer_kv_from_start"] < 0 or i < h["n_layer_kv_from_start"],
        "pattern": _pattern,
    },
    "ik_llama.cpp": {
        **_COMMON,
        **_widths("swa_layers"),
        "rope_n_rot": lambda h, i: h["rope_dim_per_layer"][i] or (h["n_rot_swa"] if h["swa_layers"][i] else h["n_rot"]),
        "is_recurrent": lambda h, i: i < h["n_layer"] and h["recurrent_layer_arr"][i],
        "has_kv": lambda h, i: h["n_layer_kv_from_start"] <= 0 or i < h["n_layer_kv_from_start"],
    },
}

_FUNCTIONS: dict[str, Any] = {
    "filled": lambda value: [value] * MAX_LAYERS,
    "distinct": lambda values: {v for v in values if v >= 0},
    "rope_scaling_type": lambda name: _ROPE_SCALING.get(name or "linear", -1),
    "sqrt": math.sqrt,
    "sqrtf": math.sqrt,
    "powf": math.pow,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "range": range,
    "INT32_MAX": 2**31 - 1,
    "__builtins__": {},
}
