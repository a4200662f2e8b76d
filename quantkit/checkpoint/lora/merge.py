"""Adapters merged into the weights of a checkpoint while they are being read.

The result equals PEFT's merge_and_unload in float32, before other transformations: a weight is decoded, the products
are added, then the architecture's rules apply. Several adapters are merged one after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.lora.low_rank import LowRank, add_products
from quantkit.checkpoint.lora.peft import WEIGHTS, Adapter, read_adapter
from quantkit.checkpoint.quantized import DecodedTensors
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import is_tied
from quantkit.checkpoint.tensors import Context, text_tensors
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Directory of an adapter, and the factor of its scale.
AdapterSpec = tuple[Path, float]


def read_adapters(selections: Sequence[AdapterSpec]) -> list[Adapter]:
    """Return the adapters to merge. Raises FormatError."""
    adapters = [read_adapter(path, strength) for path, strength in selections]
    for adapter in adapters:
        if adapter.config.get("alora_invocation_tokens"):
            raise FormatError(
                f"{adapter.path}: it is active only after an invocation (aLoRA), so it cannot be merged", "QK-E117"
            )
    return adapters


def identity(adapters: Sequence[Adapter]) -> str:
    """Return the adapters' part of a fingerprint: digests of their files and their scales."""
    scales = [[value.scale for value in adapter.weights.values()] for adapter in adapters]
    return "".join(
        f" lora {adapter.digest()} {hashlib.sha256(repr(scale).encode()).hexdigest()}"
        for adapter, scale in zip(adapters, scales, strict=True)
    )


def text_weights(adapter: Adapter, row: Architecture, context: Context) -> dict[str, tuple[str, LowRank]]:
    """Return the products of an adapter by the names of their weights in the text model, with their own.

    Raises FormatError for a weight outside the text model.
    """
    weights: dict[str, tuple[str, LowRank]] = {}
    for name, product in adapter.weights.items():
        items = list(text_tensors(row.stored, name, product, context))
        if not items:
            raise adapter.fail(name, "it is not part of the converted text model, so it would be lost")
        for text, _ in items:
            if text in weights:
                raise adapter.fail(name, f"both it and {short(weights[text][0])} are adapters of {short(text)}")
            weights[text] = name, product
    return weights


def check_copies(adapter: Adapter, shapes: dict[str, tuple[int, ...]], row: Architecture, context: Context) -> None:
    """Refuse a copy of a base weight with another shape, such as that of a larger vocabulary."""
    for name, t in adapter.copies.items():
        for text, _ in text_tensors(row.stored, name, next(iter(adapter.weights.values())), context):
            if text in shapes and shapes[text] != t.shape:
                raise adapter.fail(
                    t.name,
                    f"{list(t.shape)}, but the base has {list(shapes[text])}: the adapter has another vocabulary; "
                    "merge it with PEFT and convert the result",
                )


def merge_adapters(
    weights: DecodedTensors, adapters: Sequence[Adapter], row: Architecture, context: Context
) -> DecodedTensors:
    """Return the tensors of a checkpoint with adapters merged into them.

    Raises FormatError for a product that has no weight, or one of another shape.
    """
    tensors, first = dict(weights.tensors), dict(weights.first)
    shapes = {name: x.shape for name, x in (*tensors.items(), *first.items())}
    products: dict[str, list[LowRank]] = {}
    for adapter in adapters:
        check_copies(adapter, shapes, row, context)
        for text, (name, product) in text_weights(adapter, row, context).items():
            check_shape(adapter, name, product, shapes.get(text), context.config.path.parent)
            products.setdefault(text, []).append(product)
    for text, added_products in products.items():
        group = first if text in first else tensors
        group[text] = add_products(group[text], tuple(added_products))
    return replace(weights, tensors=tensors, first=first)


def check_shape(adapter: Adapter, name: str, product: LowRank, shape: tuple[int, ...] | None, base: Path) -> None:
    """Refuse a product whose weight is missing (None) or has another shape."""
    if shape is None:
        raise adapter.fail(name, f"{base} has no such weight; check that the adapter belongs to this model")
    if shape != product.shape:
        raise adapter.fail(
            name,
            (
                f"B @ A is {list(product.shape)}, but the weight is {list(shape)}; check that the adapter belongs to "
                "this model"
            ),
        )


def notes_of(adapters: Sequence[Adapter], config: Config) -> list[str]:
    """Return notes about merged adapters."""
    notes = []
    for adapter in adapters:
        notes.append(f"{adapter.path}: merged into {len(adapter.weights)} weights")
        notes += copy_notes(adapter)
        if is_tied(config) and any(name.endswith("embed_tokens.weight") for name in adapter.weights):
            notes.append(f"{adapter.path}: the embeddings are also the output matrix: both change, as in PEFT")
    return notes


def copy_notes(adapter: Adapter) -> list[str]:
    """Return notes on copies of weights that are not read."""
    if not adapter.copies:
        return []
    names = ", ".join(short(name) for name in list(adapter.copies)[:2])
    return [f"{adapter.path / WEIGHTS}: ignored copies of base weights: {names}"]
