"""Types of converted tensors for each --outtype, as in convert_hf_to_gguf.py (b11434, ModelBase.prepare_tensors)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.expressions import TYPE_BF16, TYPE_F16, TYPE_F32, Expression
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.errors import RecipeError
from quantkit.types import TensorType, type_by_name


@dataclass(frozen=True)
class OutType:
    """A value of --outtype: its type, llama.cpp's number for such files, its name in file names."""

    type: TensorType
    file_type: int
    name: str


OUTTYPES = {
    name.lower(): OutType(type_by_name(name), number, name)
    for name, number in (("F32", 0), ("F16", 1), ("BF16", 32), ("Q8_0", 7), ("TQ1_0", 36), ("TQ2_0", 37))
}
TYPE_Q8_0 = type_by_name("Q8_0")
#: Values of --outtype.
OUTTYPE_NAMES = (*OUTTYPES, "auto")
#: Kinds that are always F32.
_F32_KINDS = (
    "*ffn_gate_inp",
    "*ffn_gate_inp_shexp",
    "position_embd",
    "v.position_embd",
    "a.position_embd",
    "token_types",
    "*ssm_conv1d",
    "*shortconv.conv",
    "*time_mix_first",
    "*time_mix_w1",
    "*time_mix_w2",
    "*time_mix_decay_w1",
    "*time_mix_decay_w2",
    "*time_mix_lerp_fused",
    "posnet.#.norm1",
    "posnet.#.norm2",
    "*altup_correct_coef",
    "*altup_predict_coef",
    "*ssm_conv1d_q",
    "*ssm_conv1d_k",
    "*ssm_conv1d_v",
    "*indexer.proj",
)
#: Kinds that are F16 in ternary files.
_F16_KINDS = ("token_embd", "per_layer_token_embd", "output", "*altup_router", "*laurel_l", "*laurel_r")


def find_outtype(name: str, stored: Iterable[Expression]) -> OutType:
    """Return the type of --outtype; ``auto``: that of the first stored BF16 or F16 matrix, else F16."""
    if name in OUTTYPES:
        return OUTTYPES[name]
    if name != "auto":
        raise RecipeError(f"--outtype {name}: choose one of {', '.join(OUTTYPE_NAMES)}", "QK-E203")
    types = (x.type for x in stored if len(x.shape) >= 2)
    first = next((t for t in types if t in (TYPE_BF16, TYPE_F16)), TYPE_F16)
    return OUTTYPES[first.name.lower()]


def type_of_float8(name: str, x: Expression) -> TensorType:
    """Return the type of a tensor stored as float8, in a file of --fp8-as-q8."""
    if len(x.shape) <= 1 or name.endswith("_norm.weight"):
        return TYPE_F32
    return TYPE_Q8_0 if x.shape[-1] % TYPE_Q8_0.block == 0 else TYPE_F16


def type_of(
    name: str,
    x: Expression,
    layer: int | None,
    names: TensorNames,
    target: TensorType,
    file_type: TensorType | str | None = None,
) -> TensorType:
    """Return the type of a tensor in a file of type ``target``.

    Args:
        name: its name in the file.
        x: its expression; one whose type has blocks is already encoded and remains so, as do integers.
        layer: the layer of its source tensor.
        names: of the architecture.
        target: the type of the file.
        file_type: the type that its architecture gives it (``Tensor.file_type``).
    """
    if x.type.block > 1 or x.type.family == "integer":
        return x.type
    if len(x.shape) <= 1 or name.endswith("_norm.weight"):
        return TYPE_F32
    if file_type is not None:
        chosen_type = file_type if isinstance(file_type, TensorType) else target
        return chosen_type if x.shape[-1] % chosen_type.block == 0 else TYPE_F16
    if name[-7:] not in (".weight", ".lora_a", ".lora_b"):
        return TYPE_F32
    if any(names.is_kind(name, kind, layer) for kind in _F32_KINDS):
        return TYPE_F32
    if target.name in ("TQ1_0", "TQ2_0") and any(names.is_kind(name, kind, layer) for kind in _F16_KINDS):
        return TYPE_F16
    return target if x.shape[-1] % target.block == 0 else TYPE_F16
