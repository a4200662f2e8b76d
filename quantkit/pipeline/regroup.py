"""A source with its up and gate experts merged or split, for merge-up-gate and for quantize.

No data is moved yet: every tensor of the result refers to its rows in the source. merge-up-gate copies them, ``quantize
--merge-up-gate`` encodes them.

The order of the source's tensors and their shards, which the inverse needs, is stored in ``quantkit.merge.*`` keys; the
inverse removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.errors import RecipeError
from quantkit.formats.experts import GATE, MERGED, UP, find_layers
from quantkit.formats.gguf import Field, TensorInfo, ValueType
from quantkit.pipeline.expert_lists import BY_KEY, COUNT_KEY, EXPERTS_KEY
from quantkit.pipeline.experts import Layer, runtimes
from quantkit.pipeline.metadata import Metadata, prune_names
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.row_slices import whole_tensor
from quantkit.pipeline.source import Source

ORDER_KEY, SHARDS_KEY = "quantkit.merge.tensors", "quantkit.merge.shards"

#: Decides about one layer by its prefix and tensors: experts.merge_layer or experts.split_layer.
Decide = Callable[[str, Mapping[str, TensorInfo]], Layer | None]


@dataclass(frozen=True)
class RegroupedTensors:
    """The tensors of a source as written to an output, in order.

    ``shards`` are their shards, ascending; None if all go to one file. ``changed`` are the layers whose experts are
    merged or split, ``refused`` the unchanged ones, with the reason.
    """

    tensors: tuple[OutputTensor, ...]
    shards: tuple[int, ...] | None
    metadata: Metadata
    changed: tuple[Layer, ...] = ()
    refused: tuple[Layer, ...] = ()
    arch: str = ""

    @property
    def loads_merged(self) -> dict[str, bool]:
        """For each runtime whether it loads merged experts of this architecture."""
        return runtimes(self.arch)

    @property
    def loads(self) -> str:
        """``loads_merged`` in words."""
        return ", ".join(f"{name}: {'yes' if loads else 'no'}" for name, loads in self.loads_merged.items())

    def report(self, verb: str) -> list[str]:
        """Return sentences about the merged or split layers (``verb``: "merge" or "split"); empty if there are none."""
        if not self.changed:
            return []
        layers = f"{len(self.changed)} layers ({layer_names(self.changed)})"
        if verb == "split":
            return [f"--split-up-gate splits up and gate experts of {layers}", *self.refusals()]
        loading = f"runtimes that load merged experts of {self.arch}: {self.loads}"
        return [f"--merge-up-gate merges up and gate experts of {layers}", loading, *self.refusals()]

    def refusals(self) -> list[str]:
        """Return a sentence for each reason why layers are not changed."""
        by_reason: dict[str, list[Layer]] = {}
        for layer in self.refused:
            by_reason.setdefault(layer.refusal, []).append(layer)
        return [f"{layer_names(layers)}: not changed: {reason}" for reason, layers in by_reason.items()]


def keep_groups(source: Source, *, keep_split: bool, by_offset: bool = True) -> RegroupedTensors:
    """Return the source's tensors unchanged; with ``keep_split`` ordered by shard and, in llama.cpp, ``by_offset``."""
    tensors = list(source.tensors.values())
    keeps_shards = keep_split and len(source.paths) > 1
    if keeps_shards:
        tensors.sort(key=lambda tensor: (tensor.shard, tensor.offset if by_offset else 0))
    shards = tuple(tensor.shard for tensor in tensors) if keeps_shards else None
    return RegroupedTensors(tuple(map(_copy_tensor, tensors)), shards, Metadata(source.fields.values()))


def regroup(
    source: Source,
    decide: Decide,
    verb: str,
    *,
    keep_split: bool,
    leave: Mapping[str, str] | None = None,
) -> RegroupedTensors:
    """Merge or split the experts of a source as ``decide`` chooses for each layer.

    Args:
        source: the model.
        decide: decides about a layer.
        verb: "merge" or "split".
        keep_split: keep the shards of a source that has several.
        leave: layers not to change, by prefix, and the reason.

    Splitting a file that quantkit merged restores its order of tensors and its shards, and splits only what quantkit
    merged. Raises RecipeError, with the reasons, if no layer changes.
    """
    layers = [layer for p, tensors in find_layers(source.tensors).items() if (layer := decide(p, tensors)) is not None]
    layers = [replace(y, outputs=(), refusal=leave[y.prefix]) if leave and y.prefix in leave else y for y in layers]
    changed = _only_recorded(source, [layer for layer in layers if not layer.refusal])
    refused = [layer for layer in layers if layer.refusal]
    if not changed:
        raise RecipeError(_nothing_to_do(source, verb, refused), "QK-E211")
    tensors, shards, is_restored = _restore(source, _replace(source, changed))
    metadata = Metadata(source.fields.values())
    if is_restored:
        metadata.remove(ORDER_KEY, SHARDS_KEY)
    else:
        _record(metadata, source)
    if shards is None and keep_split and len(source.paths) > 1:
        tensors.sort(key=_first_shard)
        shards = [_first_shard(tensor) for tensor in tensors]
    if shards is not None and len(set(shards)) == 1:
        shards = None
    arch = str(source.get("general.architecture", ""))
    shard_numbers = None if shards is None else tuple(shards)
    return RegroupedTensors(tuple(tensors), shard_numbers, metadata, tuple(changed), tuple(refused), arch)


def layer_names(layers: Sequence[Layer]) -> str:
    """Return the abbreviated names of layers: blk.0 .. blk.46, blk.48."""
    runs: list[list[str]] = []
    last: tuple[str, int] | None = None
    for layer in layers:
        name = layer.prefix.removesuffix(".")
        stem, _, number = name.rpartition(".")
        key = (stem, int(number)) if number.isdecimal() else None
        if key is not None and last == (stem, key[1] - 1):
            runs[-1].append(name)
        else:
            runs.append([name])
        last = key
    return ", ".join(f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def prune_record(metadata: Metadata, prune: Sequence[int]) -> None:
    """Remove the layers ``prune`` from the record of a merge; drop the record if it does not have them.

    The record of pruned experts is by number of a layer, and is dropped.
    """
    metadata.remove(EXPERTS_KEY, COUNT_KEY, BY_KEY)
    order, shards = metadata.get(ORDER_KEY), metadata.get(SHARDS_KEY)
    if order is None:
        return
    try:
        renamed = prune_names(order.value, prune)
    except (RecipeError, TypeError):  # of another model, or not a list of names
        metadata.remove(ORDER_KEY, SHARDS_KEY)
        return
    indices = [i for i, name in enumerate(order.value) if name in renamed]
    names = [renamed[order.value[i]] for i in indices]
    metadata.replace(Field.of(ORDER_KEY, names, ValueType.ARRAY, ValueType.STRING))
    if shards is not None and shards.item_type is not None and shards.count == order.count:
        metadata.replace(Field.of(SHARDS_KEY, [shards.value[i] for i in indices], ValueType.ARRAY, ValueType.UINT32))


def _copy_tensor(tensor: TensorInfo) -> OutputTensor:
    return OutputTensor(tensor.name, tensor.shape, tensor.type, "copied", (whole_tensor(tensor),))


def _nothing_to_do(source: Source, verb: str, refused: Sequence[Layer]) -> str:
    if refused:
        reasons = "; ".join(f"{layer.prefix}*: {layer.refusal}" for layer in refused[:4])
        suffix = f"; and {len(refused) - 4} more layers" if len(refused) > 4 else ""
        return f"{source.paths[0]}: no layer can be {'merged' if verb == 'merge' else 'split'}: {reasons}{suffix}"
    if verb == "merge" and any(MERGED in name for name in source.tensors):
        return f"{source.paths[0]}: its up and gate experts are already merged"
    names = f"{GATE} and {UP}" if verb == "merge" else MERGED
    return f"{source.paths[0]}: has no {names} tensors"


def _recorded_order(source: Source) -> list[str]:
    order = source.get(ORDER_KEY, [])
    return list(order) if isinstance(order, list) else []


def _only_recorded(source: Source, layers: list[Layer]) -> list[Layer]:
    """Return the layers that quantkit itself changed earlier, or all if it changed none."""
    recorded = set(_recorded_order(source))
    matching = [layer for layer in layers if all(output.name in recorded for output in layer.outputs)]
    return matching or layers


def _replace(source: Source, changed: Iterable[Layer]) -> list[OutputTensor]:
    """Return all tensors of the output; a new one replaces its first source tensor."""
    outputs: dict[str, list[OutputTensor]] = {}
    replaced: set[str] = set()
    position = {name: i for i, name in enumerate(source.tensors)}
    for layer in changed:
        replaced.update(layer.tensors)
        for output in layer.outputs:
            first = min((part.source.name for part in output.parts), key=position.__getitem__)
            outputs.setdefault(first, []).append(output)
    result: list[OutputTensor] = []
    for name, tensor in source.tensors.items():
        result += outputs.get(name, ())
        if name not in replaced:
            result.append(_copy_tensor(tensor))
    return result


def _first_shard(tensor: OutputTensor) -> int:
    """Return the shard of the first of a tensor's halves."""
    return min(part.source.shard for part in tensor.parts)


def _restore(source: Source, tensors: list[OutputTensor]) -> tuple[list[OutputTensor], list[int] | None, bool]:
    """Return the tensors in the recorded order, their shards, and True if they are the recorded ones."""
    order = _recorded_order(source)
    by_name = {tensor.name: tensor for tensor in tensors}
    if not order or set(order) != set(by_name) or len(order) != len(tensors):
        return tensors, None, False
    shards = source.get(SHARDS_KEY)
    has_shards = isinstance(shards, list) and len(shards) == len(order) and shards == sorted(shards)
    return [by_name[name] for name in order], list(shards) if has_shards and isinstance(shards, list) else None, True


def _record(metadata: Metadata, source: Source) -> None:
    """Record the order and the shards of the source's tensors for the inverse."""
    metadata.set(Field.of(ORDER_KEY, list(source.tensors), ValueType.ARRAY, ValueType.STRING))
    metadata.remove(SHARDS_KEY)
    if len(source.paths) > 1:
        shards = [tensor.shard for tensor in source.tensors.values()]
        metadata.set(Field.of(SHARDS_KEY, shards, ValueType.ARRAY, ValueType.UINT32))
