"""Scales of tensors in NVFP4: which ones the output has, and which of the source are multiplied into the values.

llama.cpp multiplies the product of a weight by ``blk.N.X.scale`` if the architecture's graph does so; model/arch.py has
the table. NVFP4 without such a scale loses accuracy where weights are small: below 0.01 its scales of blocks are
subnormal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quantkit.errors import TypeNotSupported
from quantkit.kernels.formats import SCALED
from quantkit.model.arch import ARCHS
from quantkit.model.builder import kind_of, layer_of
from quantkit.pipeline.folded_source import FoldedSource, read_scales, scale_name, scale_of
from quantkit.pipeline.lora_source import LoraSource
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.recipe import abbreviate
from quantkit.pipeline.row_slices import RowSlice, whole_tensor, with_matrices
from quantkit.pipeline.scaled_source import ScaledSource, scale_info
from quantkit.quantize.draft import Draft

#: A file's tensors, and the shard of each; None if all are in one file.
Placed = tuple[list[OutputTensor], list[int] | None]


def with_tensor_scales(
    draft: Draft, tensors: Sequence[OutputTensor], shards: Sequence[int] | None
) -> tuple[Draft, Placed, list[str]]:
    """Give tensors that become NVFP4 a scale, and values of the source theirs; also return notes.

    A scale follows its tensor, in the same shard. Raises TypeNotSupported for scales of the source that cannot follow
    their tensor, FormatError for damaged ones.
    """
    draft, outputs, shard_numbers = _fold(draft, tensors, shards)
    notes, parts = list[str](), dict[str, RowSlice]()
    reasons = dict[str, list[str]]()
    for i, tensor in enumerate(outputs):
        if tensor.type.name != "NVFP4" or not tensor.encoder:
            continue
        reason = _reason_without(draft, tensor)
        if reason is None:
            outputs[i] = _add_scale(tensor, parts)
        else:
            outputs[i] = replace(tensor, reason=f"{tensor.reason}; without a scale of the tensor: {reason}")
            reasons.setdefault(reason, []).append(tensor.name)
    if reasons:
        names = "; ".join(f"{abbreviate(names)}: {reason}" for reason, names in reasons.items())
        notes.append(f"QK-W008: NVFP4 without a scale of the tensor, so that small weights lose accuracy: {names}")
    if not parts:
        return draft, (outputs, shard_numbers), notes
    placed = _with_scales(outputs, shard_numbers, parts)
    return replace(draft, source=ScaledSource(draft.source, parts)), placed, notes


def _reason_without(draft: Draft, tensor: OutputTensor) -> str | None:
    """Return the reason why a tensor of NVFP4 gets no scale; None if it gets one."""
    arch = str(draft.key("general.architecture"))
    row = ARCHS.get(arch)
    stem = tensor.name.removesuffix(".weight")
    layer = layer_of(stem)
    if not draft.options.tensor_scales:
        return "--no-tensor-scales"
    if tensor.keeps_grid:
        return "its blocks are kept on their grid"
    if tensor.custom is not None:
        return "it has an encoder from Python"
    if row is None:
        return f"not known whether llama.cpp reads scales of {arch}"
    outputs = {t.name for t in draft.groups.tensors}
    if tensor.name == stem or tensor.name.startswith("enc.") or not row.has_scale(kind_of(stem)):
        return f"llama.cpp multiplies by none in {arch}"
    if layer is not None and layer >= draft.first_nextn_layer - len(draft.options.prune_layers):
        return "a prediction layer"
    if f"{stem}.bias" in outputs and kind_of(stem) in ("ffn_gate", "ffn_up", "ffn_down"):
        return "llama.cpp would multiply its bias, too"
    if scale_name(tensor.name) in outputs and scale_name(tensor.name) in draft.source.tensors:
        return "the model has one of another type"
    if any(part.source.type.name == "I2_S" for part in tensor.parts) or len(tensor.parts) > 1:
        return f"its rows are of {len(tensor.parts)} tensors or of I2_S"
    return None


def _add_scale(tensor: OutputTensor, parts: dict[str, RowSlice]) -> OutputTensor:
    """Return a tensor that is encoded with a scale per matrix, whose rows are entered in ``parts``."""
    matrices = math.prod(tensor.shape[2:])
    part = with_matrices(tensor.parts[0], matrices)
    name = scale_name(tensor.name)
    parts[name] = replace(part, inputs=None)
    unit = "tensor" if matrices == 1 else "expert"
    return replace(
        tensor,
        reason=f"{tensor.reason}; a scale per {unit}",
        parts=(replace(part, scale=scale_info(name, part)),),
        encoder=SCALED,
    )


def _with_scales(outputs: Sequence[OutputTensor], shards: Sequence[int] | None, parts: dict[str, RowSlice]) -> Placed:
    """Return the tensors with each scale after its tensor."""
    result, numbers = list[OutputTensor](), list[int]()
    for i, tensor in enumerate(outputs):
        name = scale_name(tensor.name)
        group = [tensor]
        if name in parts and tensor.encoder == SCALED:
            info = scale_info(name, parts[name])
            group.append(OutputTensor(name, info.shape, info.type, f"scale of {tensor.name}", (whole_tensor(info),)))
        result += group
        numbers += [shards[i]] * len(group) if shards is not None else []
    return result, None if shards is None else numbers


# ---------------------------------------------------------------- scales of the source


def _fold(
    draft: Draft, tensors: Sequence[OutputTensor], shards: Sequence[int] | None
) -> tuple[Draft, list[OutputTensor], list[int] | None]:
    """Multiply values that do not remain NVFP4 by the scales of the source, and drop these."""
    numbers = None if shards is None else list(shards)
    scales = {
        part.source.name: scale
        for tensor in tensors
        for part in tensor.parts
        if (scale := scale_of(draft.source, part.source)) is not None
    }
    if not scales:
        return draft, list(tensors), numbers
    if isinstance(draft.source, LoraSource):
        raise TypeNotSupported(
            f"{draft.source.paths[0]}: an adapter cannot be merged into NVFP4 with scales ({next(iter(scales))}); "
            "quantize to BF16 with --allow-requantize first",
            "QK-E302",
        )
    names = {part.source.name for t in tensors for part in t.parts if t.encoder} & set(scales)
    if not names:
        return draft, list(tensors), numbers
    stored = draft.source.tensors
    values = {name: read_scales(draft.source, stored[name], scales[name]) for name in names}
    source = FoldedSource(draft.source, values)
    dropped = {scales[name].name for name in names}
    keep = [i for i, t in enumerate(tensors) if not (t.is_whole and t.parts[0].source.name in dropped)]
    outputs = [_with_source(tensors[i], source) for i in keep]
    return replace(draft, source=source), outputs, None if numbers is None else [numbers[i] for i in keep]


def _with_source(tensor: OutputTensor, source: FoldedSource) -> OutputTensor:
    """Return a tensor whose parts are of the values of a source."""
    if not any(part.source.name in source.scales for part in tensor.parts):
        return tensor
    parts = tuple(replace(part, source=source.tensors[part.source.name]) for part in tensor.parts)
    return replace(tensor, parts=parts, reason=f"{tensor.reason}; times the scale of the source")
