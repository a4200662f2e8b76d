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

from quantkit.checkpoint.expressions import Expression, Stored
from quantkit.checkpoint.lora.dora import Rescaled
from quantkit.checkpoint.lora.low_rank import LowRank, LowRankSum, add_products
from quantkit.checkpoint.lora.parts import EncoderPart, Part, base_of
from quantkit.checkpoint.lora.peft import WEIGHTS, Adapter, read_adapter
from quantkit.checkpoint.quantized import DecodedTensors
from quantkit.checkpoint.rules import is_tied
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


def part_weights(adapter: Adapter, part: Part) -> dict[str, tuple[str, LowRank]]:
    """Return the products of an adapter by the names of their weights in a part of the model, with their own.

    Raises FormatError for a weight of neither part.
    """
    weights: dict[str, tuple[str, LowRank]] = {}
    for name, product in adapter.weights.items():
        for text in _tensors_of(adapter, part, name, product):
            if text in weights:
                raise adapter.fail(name, f"both it and {short(weights[text][0])} are adapters of {short(text)}")
            weights[text] = name, product
    return weights


def _tensors_of(adapter: Adapter, part: Part, name: str, x: Expression) -> dict[str, Expression]:
    """Return the tensors that one of an adapter's changes; none if they belong to the other part."""
    items = dict(part.tensors(name, x))
    if not items and not part.leaves(name):
        raise adapter.fail(name, "it is not part of the converted text model, so it would be lost")
    return items


def check_copies(adapter: Adapter, shapes: dict[str, tuple[int, ...]], part: Part) -> None:
    """Refuse a copy of a base weight with another shape, such as that of a larger vocabulary."""
    for name, t in adapter.copies.items():
        for text, _ in part.tensors(name, next(iter(adapter.weights.values()))):
            if text in shapes and shapes[text] != t.shape:
                raise adapter.fail(
                    t.name,
                    f"{list(t.shape)}, but the base has {list(shapes[text])}: the adapter has another vocabulary; "
                    "merge it with PEFT and convert the result",
                )


def merge_adapters(weights: DecodedTensors, adapters: Sequence[Adapter], part: Part) -> DecodedTensors:
    """Return the tensors of a part of a checkpoint with adapters merged into them, one after another.

    Raises FormatError for a product or a whole tensor that has no tensor in the checkpoint, or one of another shape.
    """
    tensors, first = dict(weights.tensors), dict(weights.first)
    shapes = {name: x.shape for name, x in (*tensors.items(), *first.items())}
    for adapter in adapters:
        check_copies(adapter, shapes, part)
        for text, (t, x) in replacements_in(adapter, part).items():
            _check_whole(adapter, t, x.shape, text, shapes.get(text), part)
            (first if text in first else tensors)[text] = x
        for text, (name, product) in part_weights(adapter, part).items():
            check_shape(adapter, name, product, shapes.get(text), base_of(part))
            group = first if text in first else tensors
            group[text] = _add_product(group[text], adapter, name, product)
    return replace(weights, tensors=tensors, first=first)


def _add_product(x: Expression, adapter: Adapter, name: str, product: LowRank) -> Expression:
    """Return a weight with a product added, and rescaled by the magnitudes of DoRA, if there are any."""
    if name not in adapter.magnitudes:
        return replace(x, products=(*x.products, product)) if isinstance(x, LowRankSum) else add_products(x, (product,))
    magnitudes = Stored(adapter.magnitudes[name])
    return Rescaled(add_products(x, (product,)), magnitudes, name, by_column=product.of_embeddings)


def replacements_in(adapter: Adapter, part: Part) -> dict[str, tuple[StoredTensor, Expression]]:
    """Return the adapter's whole tensors, as stored and as a part of the model has them, by the names there."""
    result: dict[str, tuple[StoredTensor, Expression]] = {}
    for name, t in adapter.replacements.items():
        for text, x in _tensors_of(adapter, part, name, Stored(t)).items():
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
    part: Part,
) -> None:
    """Refuse a whole tensor without one to replace, or of another shape; and one of two tied matrices."""
    if is_tied(part.config) and text.endswith(("embed_tokens.weight", "lm_head.weight")):
        raise adapter.fail(
            t.name,
            "the embeddings are also the output matrix (tie_word_embeddings), of which the adapter replaces one, so "
            "GGUF needs two matrices: merge it with PEFT, untie them, and convert the result",
        )
    if base_shape is None:
        raise adapter.fail(t.name, f"{base_of(part)} has no such tensor to replace (modules_to_save)")
    if base_shape != shape:
        raise adapter.fail(
            t.name,
            f"{list(shape)}, but the tensor of the base that it replaces is {list(base_shape)}: the adapter has "
            "another vocabulary or another base; merge it with PEFT and convert the result",
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


def notes_of(adapters: Sequence[Adapter], part: Part) -> list[str]:
    """Return notes about adapters merged into a part of a model."""
    notes = []
    for adapter in adapters:
        n, replacements = len(part_weights(adapter, part)), list(replacements_in(adapter, part))
        dora = " and rescaled (DoRA)" if adapter.magnitudes and n else ""
        notes.append(f"{adapter.path}: merged into {n} weights{dora}")
        if replacements:
            names = ", ".join(map(short, replacements[:3]))
            notes.append(f"{adapter.path}: {len(replacements)} tensors replace those of the base: {names}")
        if left := left_tensors(adapter, part):
            names = ", ".join(map(short, left[:2]))
            owner, remedy = ("encoders", "; --mmproj merges them into the mmproj file")
            if isinstance(part, EncoderPart):
                owner, remedy = "text model", ""
            notes.append(f"{adapter.path}: {len(left)} tensors belong to the {owner}: {names}{remedy}")
        notes += copy_notes(adapter)
        if is_tied(part.config) and any(name.endswith("embed_tokens.weight") for name in adapter.weights):
            notes.append(f"{adapter.path}: the embeddings are also the output matrix: both change, as in PEFT")
    return notes


def left_tensors(adapter: Adapter, part: Part) -> list[str]:
    """Return the tensors of an adapter that belong to the other part of the model."""
    tensors: dict[str, Expression] = {
        **adapter.weights,
        **{name: Stored(t) for name, t in adapter.replacements.items()},
    }
    return [name for name, x in tensors.items() if not part.tensors(name, x) and part.leaves(name)]


def copy_notes(adapter: Adapter) -> list[str]:
    """Return notes on copies of weights that are not read."""
    if not adapter.copies:
        return []
    names = ", ".join(short(name) for name in list(adapter.copies)[:2])
    return [f"{adapter.path / WEIGHTS}: ignored copies of base weights: {names}"]
