"""Conversion rules that several families of vision and audio encoders share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.config import Config, Json, read_json
from quantkit.checkpoint.expressions import (
    Expression,
    Shaped,
    Transposed,
    concatenate,
    stack,
    take,
)
from quantkit.checkpoint.rules import Change
from quantkit.checkpoint.tensors import Context, InverseContext, OneWayRule, Rule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.safetensors import StoredTensor, read_header
from quantkit.types import TensorType


@dataclass(frozen=True)
class NameInFile(OneWayRule):
    """Names tensors of the file: ``replacement`` for the regular expression ``pattern``, instead of the name map."""

    pattern: str
    replacement: str | Callable[[re.Match[str]], str]

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        name = re.sub(self.pattern, self.replacement, tensor.name)
        return None if name == tensor.name else (replace(tensor, name_in_file=name),)


@dataclass(frozen=True)
class ForceType(OneWayRule):
    """Gives tensors whose names match ``pattern`` a type, whatever that of the file."""

    pattern: str
    type: TensorType

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        return (replace(tensor, file_type=self.type),) if re.search(self.pattern, tensor.name) else None


@dataclass(frozen=True)
class SplitFrames(Rule):
    """Splits the convolution of two frames, [out, channels, 2, height, width], into v.patch_embd.weight and .weight.1.

    llama.cpp computes a 3-D convolution over two equal frames as the sum of two 2-D ones. ``frames``: another number,
    or None for any, of which ``count`` returns how many a configuration states.
    """

    pattern: str
    frames: int | None = 2
    count: Callable[[Config], int] | None = None

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not re.search(self.pattern, tensor.name):
            return None
        shape = tensor.x.shape
        if len(shape) != 5 or shape[2] != (self.frames or shape[2]):
            raise context.fail(
                tensor, f"its shape {list(shape)} is not that of a convolution over {self.frames} frames"
            )
        frames = (Shaped(take(tensor.x, 2, range(i, i + 1)), (*shape[:2], *shape[3:])) for i in range(shape[2]))
        return [
            replace(tensor, x=x, name_in_file=f"v.patch_embd.weight{f'.{i}' if i else ''}")
            for i, x in enumerate(frames)
        ]

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Join the frames, whose names end in their numbers from the second on."""
        match = re.fullmatch(r"(.*\.weight)(?:\.([1-9]))?", tensor.name)
        if match is None or not re.search(self.pattern, match[1]):
            return None
        n = self.frames if self.count is None else self.count(context.config)
        if n is None:
            return super().invert(tensor, context)
        parts = context.gather(self, match[1], match[2] or "0", tensor, n)
        if parts is None:
            return ()
        frames = [parts[number].x for number in sorted(parts)]
        if len({x.shape for x in frames}) > 1 or len(frames[0].shape) != 4:
            raise context.fail(tensor, "the convolutions of its frames differ in shape")
        x = concatenate([Shaped(x, (*x.shape[:2], 1, *x.shape[2:])) for x in frames], 2)
        return (replace(tensor, name=match[1], x=x),)


@dataclass(frozen=True)
class DropUnknown(OneWayRule):
    """Drops tensors that files do not have, but not those of layers beyond the last: these are an error."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        of_first_layer = re.sub(r"\.\d+\.", ".0.", tensor.name)
        return None if any(map(context.names.find, (tensor.name, of_first_layer))) else ()


@dataclass(frozen=True)
class StackNumbered(OneWayRule):
    """Stacks tensors that differ in a number, from 0 on, as the tensor ``name`` of the file.

    They take the place of the last. ``pattern`` has the number as its group; ``count`` returns how many there are.
    """

    pattern: str
    name: str
    count: Callable[[Config], int]
    type: TensorType | None = None

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        n = self.count(context.config)
        parts = context.gather(self, self.name, match[1], tensor, n)
        if parts is None:
            return ()
        numbers = [str(i) for i in range(n)]
        if not n or set(numbers) != set(parts):
            raise context.fail(tensor, f"one of {len(parts)}, which should be numbered from 0 to {n - 1}", "QK-E107")
        xs = [parts[number].x for number in numbers]
        if len({x.shape for x in xs}) > 1:
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not that of the others of {self.name}")
        return (replace(tensor, x=stack(xs), name_in_file=self.name, file_type=self.type or tensor.file_type),)


def squeeze_last(tensor: Tensor, context: Context) -> Expression:
    """Remove the last dimension if it is 1."""
    return Shaped(tensor.x, tensor.x.shape[:-1]) if tensor.x.shape[-1:] == (1,) else tensor.x


def read_part(folder: Path) -> Json:
    """Return config.json of a part of the model that has a folder of its own."""
    path = folder / "config.json"
    if not path.is_file():
        raise FormatError(f"{path}: no such file; the encoders need it: download all folders of the model", "QK-E101")
    return read_json(path)


def part_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a part of the model that has a folder of its own, in the order of storage."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FormatError(f"{path}: no such file; the encoders need it: download all folders of the model", "QK-E101")
    return dict(sorted(read_header(path).items(), key=lambda item: item[1].offset))


def add_axes(before: int, after: int) -> Change:
    """Return the change that adds dimensions of 1 before and after those of a tensor."""

    def change(tensor: Tensor, context: Context) -> Expression:
        return Shaped(tensor.x, (*(1,) * before, *tensor.x.shape, *(1,) * after))

    return change


def remove_axis(axis: int) -> Change:
    """Return the change that removes the dimension ``axis`` of a tensor of three dimensions, which must be 1."""

    def change(tensor: Tensor, context: Context) -> Expression:
        shape = tensor.x.shape
        if len(shape) != 3:
            raise ValueError(f"{len(shape)} dimensions instead of 3")
        return Shaped(tensor.x, (*shape[:axis], *shape[axis + 1 :]))

    return change


def linear_to_convolution(x: Expression, patch: int, channels: int) -> Expression:
    """Return weights of flat patches, [out, patch * patch * channels], as [out, channels, patch, patch]."""
    out = x.shape[0]
    return Shaped(Transposed(Shaped(x, (out, patch * patch, channels))), (out, channels, patch, patch))


def convolution_to_linear(x: Expression) -> Expression:
    """Return the weights of a convolution, [out, channels, patch, patch], as those of flat patches."""
    out, channels, height, width = x.shape
    return Shaped(Transposed(Shaped(x, (out, channels, height * width))), (out, height * width * channels))


#: Ends of the names of the ranges of clipped activations.
_RANGES = (".input_max", ".input_min", ".output_max", ".output_min")


@dataclass(frozen=True)
class NameRanges(Rule):
    """Names the ranges of clipped activations after the weight of their layer."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        stem, dot, end = tensor.name.rpartition(".")
        name = context.names.find(stem) if dot + end in _RANGES else None
        return None if name is None else (replace(tensor, name_in_file=name + dot + end),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Return a range as a scalar."""
        return (replace(tensor, x=Shaped(tensor.x, ())),) if tensor.name.endswith(_RANGES) else None
