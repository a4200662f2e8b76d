"""Scale tensors of NVFP4: one for a whole tensor, or one per expert.

They follow the tensor through all transformations: stacked experts keep all scales, a part keeps that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from quantkit.checkpoint.expressions import (
    Concatenated,
    Constant,
    Expression,
    Gathered,
    Shaped,
    Transposed,
    read_f32,
    size_of,
)
from quantkit.checkpoint.quantized.blocks import Nvfp4
from quantkit.checkpoint.tensors import Tensor


def add_scale_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by their GGUF names, each followed by its scales.

    A scale that the model itself has of that name (Gemma 4's, of each expert) is multiplied into them.
    """
    pairs = list(tensors)
    own_scales = {name: tensor for name, tensor in pairs if name.endswith(".scale")}
    used = set()
    for name, tensor in pairs:
        if name in used:
            continue
        yield name, tensor
        for end, values in outer_scales(tensor.x).items():
            scale_name = name.removesuffix("weight") + end
            if (own_scale := own_scales.get(scale_name)) is not None and size_of(own_scale.x) == len(values):
                used.add(scale_name)
                values = (np.array(values, np.float32) * read_f32(own_scale.x, 0, len(values))).tolist()
            yield scale_name, replace(tensor, name=scale_name, x=Constant(tuple(values)))


def outer_scales(x: Expression) -> dict[str, Sequence[float]]:
    """Return the scales of an NVFP4 tensor, one a matrix, by the suffix of their name.

    Scales that are all 1 are omitted, as in convert_hf_to_gguf.py, so a file's tensors depend on its values.
    """
    return {end: values for end, values in _outer(x).items() if not _all_one(values)}


def _all_one(values: Sequence[float]) -> bool:
    return abs(values[0] - 1.0) < 1e-6 if len(values) == 1 else np.allclose(values, 1.0, atol=1e-6)


def _outer(x: Expression) -> dict[str, Sequence[float]]:
    if x.type.name != "NVFP4":
        return {}
    if isinstance(x, Nvfp4):
        return {"scale": x.scale.values, "input_scale": x.input_scale.values}
    if isinstance(x, Concatenated):
        parts = [_outer(item) for item in x.xs]
        if len(x.shape) == len(x.xs[0].shape):  # along an existing dimension, where all parts have the same scale
            return parts[0]
        return {end: [value for part in parts for value in part[end]] for end in parts[0]}
    if isinstance(x, (Gathered, Shaped, Transposed)):
        return _outer(x.x)
    raise TypeError(f"{type(x).__name__} of NVFP4: no rule for its scale")
