"""Sarvam-M MoE, built like Bailing 2.

Facts of llama.cpp b11434, conversion/bailingmoe.py (SarvamMoEModel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quantkit.checkpoint.expressions import Expression, as_f32, from_f32, read_f32, size_of, value_bytes, values_in
from quantkit.checkpoint.models import bailing, llama
from quantkit.checkpoint.nextn import layers_with_nextn
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import Rename, StackExperts, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType

#: A bias of the router is stored without an ending.
_ROUTER_BIAS = Rename(r"\.expert_bias$", ".expert_bias.bias")


def subtract_mean(tensor: Tensor, context: Context) -> Expression:
    return Centered(tensor.x)


#: The bias of the router, with its mean subtracted.
CENTER_ROUTER_BIAS = Transform(r"\.expert_bias$", subtract_mean, None)


@dataclass(frozen=True)
class Centered:
    """A vector with its mean subtracted, in the type it is stored in, as torch computes it."""

    x: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def type(self) -> TensorType:
        return self.x.type

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        values = read_f32(self.x, 0, size_of(self.x))
        mean = np.empty(value_bytes(self.type, 1), np.uint8)
        from_f32(self.type, np.array([values.mean(dtype=np.float64)], np.float32), mean)
        n = values_in(self.type, out.size)
        from_f32(self.type, values[start : start + n] - as_f32(self.type, mean), out)

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


_SARVAM = Architecture(
    "bailingmoe2",
    stored=(CENTER_ROUTER_BIAS, _ROUTER_BIAS),
    rules=(StackExperts(),),
    keys=(*bailing.V2_KEYS, llama.set_rope_width),
    layers=layers_with_nextn,
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "SarvamMoEForCausalLM": _SARVAM,
    "modeling_sarvam_moe.SarvamMoEForCausalLM": _SARVAM,
}
