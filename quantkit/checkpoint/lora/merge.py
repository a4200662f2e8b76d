"""Adapters merged into the weights of a checkpoint while they are being read.

The result equals PEFT's merge_and_unload in float32, before other transformations: a weight is decoded, the product is
added, rows get their lengths (DoRA), then the architecture's rules apply. Whole tensors of an adapter replace those of
the base. Several adapters are merged one after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Stored
from quantkit.checkpoint.lora.dora import Rescaled
from quantkit.checkpoint.lora.low_rank import Added, LowRank, add_products
from quantkit.checkpoint.lora.peft import WEIGHTS, Adapter, read_adapter
from quantkit.checkpoint.quantized import DecodedTensors
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import is_tied
from quantkit.checkpoint.tensors import Context, text_tensors
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor

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
    """Return the tensors of a checkpoint with adapters merged into them, one after another.

    Raises FormatError for a product or a whole tensor that has no tensor in the checkpoint, or one of another shape.
    """
    tensors, first = dict(weights.tensors), dict(weights.first)
    shapes = {name: x.shape for name, x in (*tensors.items(), *first.items())}
    for adapter in adapters:
        check_copies(adapter, shapes, row, context)
        for text, (t, x) in whole_tensors(adapter, row, context).items():
            _check_whole(adapter, t, x.shape, text, shapes.get(text), context)
            (first if text in first else tensors)[text] = x
        for text, (name, product) in text_weights(adapter, row, context).items():
            check_shape(adapter, name, product, shapes.get(text), context.config.path.parent)
            group = first if text in first else tensors
            group[text] = _merged(group[text], adapter, name, product)
    return replace(weights, tensors=tensors, first=first)


def _merged(x: Expression, adapter: Adapter, name: str, product: LowRank) -> Expression:
    """Return a weight with a product added, and rescaled by the magnitudes of DoRA, if there are any."""
    if name not in adapter.magnitudes:
        return replace(x, products=(*x.products, product)) if isinstance(x, Added) else add_products(x, (product,))
    magnitudes = Stored(adapter.magnitudes[name])
    return Rescaled(add_products(x, (product,)), magnitudes, name, by_column=product.of_embeddings)


def whole_tensors(
    adapter: Adapter, row: Architecture, context: Context
) -> dict[str, tuple[StoredTensor, Expression]]:
    """Return the adapter's whole tensors, as stored and as the model has them, by the names in the text model."""
    result: dict[str, tuple[StoredTensor, Expression]] = {}
    for name, t in adapter.whole.items():
        items = list(text_tensors(row.stored, name, Stored(t), context))
        if not items:
            raise adapter.fail(t.name, "it is not part of the converted text model, so it would be lost")
        for text, x in items:
            if text in result:
                raise adapter.fail(t.name, f"both it and {short(result[text][0].name)} replace {short(text)}")
            result[text] = t, x
    return result


def _check_whole(
    adapter: Adapter,
    t: StoredTensor,
    shape: tuple[int, ...],
    text: str,
    base_shape: tuple[int, ...] | None,
    context: Context,
) -> None:
    """Refuse a whole tensor without one to replace, or of another shape; and one of two tied matrices."""
    if is_tied(context.config) and text.endswith(("embed_tokens.weight", "lm_head.weight")):
        raise adapter.fail(
            t.name,
            "the embeddings are also the output matrix (tie_word_embeddings), of which the adapter replaces one, so "
            "GGUF needs two matrices: merge it with PEFT, untie them, and convert the result",
        )
    if base_shape is None:
        raise adapter.fail(t.name, f"{context.config.path.parent} has no such tensor to replace (modules_to_save)")
    if base_shape != shape:
        raise adapter.fail(
            t.name,
            f"{list(shape)}, but the tensor of the base that it replaces is {list(base_shape)}: the adapter has another "
            "vocabulary or another base; merge it with PEFT and convert the result",
        )


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
        dora = " and rescaled (DoRA)" if adapter.magnitudes else ""
        notes.append(f"{adapter.path}: merged into {len(adapter.weights)} weights{dora}")
        if adapter.whole:
            names = ", ".join(short(name) for name in list(adapter.whole)[:3])
            notes.append(f"{adapter.path}: {len(adapter.whole)} tensors replace those of the base: {names}")
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
