"""The experts that stay in each layer of a MoE model, and what follows from them: tensors, keys, a record in the file.

A list names the experts by layer, {"3": [0, 1, 5, 6]}, in a JSON file, alone or as the member "experts" of what
``prune-experts --json`` prints; or it is the record of a file that was pruned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.experts import BY_EXPERT, UNPRUNABLE
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, ValueType, open_model
from quantkit.formats.own_json import read_own_json
from quantkit.formats.remote import locate
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.metadata import Metadata
from quantkit.pipeline.pruned_source import PrunedSource
from quantkit.pipeline.source import Source

#: Experts of a layer, ascending, by its number.
ExpertLists = Mapping[int, tuple[int, ...]]

#: The experts of the original model that a file has ("blk.3: 0 1 5 6"), their number there, and how they were chosen.
EXPERTS_KEY, COUNT_KEY, BY_KEY = "quantkit.prune.experts", "quantkit.prune.expert_count", "quantkit.prune.by"
#: The keys of a companion about its model, which is then another one, and about statistics, which are dropped.
_STALE_KEYS = ("quantkit.imatrix.model", "quantkit.covariance.model", "imatrix.stats_schema")
_FILLED_KEY = "quantkit.imatrix.filled"
_RECORD = re.compile(r"blk\.(\d{1,9}):((?: \d{1,9})+)")
_COMPANION = re.compile(r"(blk\.\d{1,9}\.ffn_\w+_exps\.\w+)\.(in_sum2?|counts|saliency|cov|cov_router|weight)")


def layers_of(source: Source) -> dict[int, list[TensorInfo]]:
    """Return the tensors by expert of each layer of a model, an importance matrix or a covariance file.

    Raises RecipeError for experts that cannot be pruned, and if there are none.
    """
    kind = str(source.get("general.type", "model"))
    layers: dict[int, list[TensorInfo]] = {}
    for name, tensor in source.tensors.items():
        match = _COMPANION.fullmatch(name)
        match = BY_EXPERT.fullmatch(match[1] if match and kind in ("imatrix", "covariance") else name)
        if match is not None:
            layers.setdefault(int(match[1]), []).append(tensor)
        elif reason := next((text for pattern, text in UNPRUNABLE if pattern.fullmatch(name)), ""):
            raise RecipeError(f"{source.paths[0]}: tensor {name}: {reason}", "QK-E211")
    layers = {n: tensors for n, tensors in sorted(layers.items()) if any("_exps." in t.name for t in tensors)}
    if not layers:
        raise RecipeError(f"{source.paths[0]}: has no experts", "QK-E211")
    return layers


def expert_count(source: Source) -> int:
    """Return the number of experts of each layer. Raises FormatError if key and tensors differ."""
    layers = layers_of(source)
    n = layers[min(layers)][0].shape[-1] if _is_companion(source) else _key(source, "expert_count")
    for tensor in (tensor for tensors in layers.values() for tensor in tensors):
        if tensor.shape[-1] != n:
            raise FormatError(
                f"{source.where(tensor)}: tensor {tensor.name} is {list(tensor.shape)}, but there are {n} experts",
                "QK-E106",
            )
    return n


def group_count(source: Source) -> int:
    """Return the number of groups of experts among which the router selects first; 1 if it does not."""
    return max(1, _key(source, "expert_group_count", 1))


def _key(source: Source, name: str, default: int | None = None) -> int:
    key = f"{source.get('general.architecture', '')}.{name}"
    value = source.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{source.paths[0]}: {key} is {value}, not a number", "QK-E123")
    return value


def _is_companion(source: Source) -> bool:
    return source.get("general.type", "model") in ("imatrix", "covariance")


# ---------------------------------------------------------------- reading


def read_experts(path: str | Path, source: Source) -> ExpertLists:
    """Return the experts that a JSON file lists, or that the GGUF file ``path`` has of the model ``source``.

    Raises FormatError for a damaged list, and for a record that has experts which ``source`` lacks.
    """
    path = locate(path)
    if path.suffix.lower() != ".gguf":
        return read_own_json(path, "a list of experts by layer", parse_experts)
    with open_model(path) as file:
        record = _record(file)
    if not record:
        raise FormatError(f"{path}: has no {EXPERTS_KEY}: it is not a file of prune-experts", "QK-E123")
    present = _record(source)
    try:
        return {n: tuple(present[n].index(e) for e in list_) if present else list_ for n, list_ in record.items()}
    except (KeyError, ValueError):
        raise FormatError(f"{path}: has experts that {source.paths[0]} lacks", "QK-E207") from None


def parse_experts(value: Any) -> ExpertLists:
    """Return the experts by layer of a JSON value; raises ValueError, or another error of damaged files."""
    lists = value.get("experts", value)
    result = {int(layer): tuple(sorted(experts)) for layer, experts in lists.items()}
    for layer, experts in result.items():
        if not experts or len(set(experts)) < len(experts) or any(type(e) is not int or e < 0 for e in experts):
            raise ValueError(f"layer {layer}: not a list of different experts")
    return result


def _record(source: Source | GGUFFile) -> dict[int, tuple[int, ...]]:
    lines = source.get(EXPERTS_KEY, [])
    matches = [_RECORD.fullmatch(str(line)) for line in lines] if isinstance(lines, list) else [None]
    if None in matches:
        raise FormatError(f"{source.paths[0]}: {EXPERTS_KEY} is damaged", "QK-E123")
    return {int(m[1]): tuple(map(int, m[2].split())) for m in matches if m is not None}


# ---------------------------------------------------------------- pruning


def prune_source(source: Source, lists: ExpertLists, criterion: str = "list") -> PrunedSource:
    """Return a source with these experts alone; ``criterion``: how they were chosen, for the record.

    A model, an importance matrix or a covariance file: companions follow with the same list, without statistics.

    Raises:
        RecipeError: layers without a list, lists of different length, more experts used than left, unequal groups;
            hash-routed or chunk experts, and types that mix experts.
        FormatError: a tensor or key does not fit.
    """
    layers, n = layers_of(source), expert_count(source)
    _check_lists(source, layers, n, lists)
    if not _is_companion(source):
        _check_routing(source, n, lists)
    experts = {t.name: lists[layer] for layer, tensors in layers.items() for t in tensors}
    for name in experts:
        _check_type(source, source.tensors[name])
    drop = frozenset(name for name in source.tensors if _is_companion(source) and name.endswith(".stats"))
    return PrunedSource(source, experts, _fields(source, n, lists, criterion), drop)


def _check_lists(source: Source, layers: Mapping[int, object], n: int, lists: ExpertLists) -> None:
    path = source.paths[0]
    if missing := sorted(layers.keys() - lists.keys()):
        raise RecipeError(
            f"{path}: no list of experts for layer {missing[0]}: list all {len(layers)} layers", "QK-E203"
        )
    if (unknown := sorted(lists.keys() - layers.keys())) and not _is_companion(source):
        raise RecipeError(f"{path}: a list of experts for layer {unknown[0]}, which has none", "QK-E203")
    sizes = {len(list_) for list_ in lists.values()}
    if len(sizes) > 1:
        raise RecipeError(f"lists of {min(sizes)} to {max(sizes)} experts: every layer must have as many", "QK-E203")
    for layer in layers:
        if lists[layer][-1] >= n or not 1 < len(lists[layer]) < n:
            raise RecipeError(
                f"layer {layer}: {len(lists[layer])} experts up to number {lists[layer][-1]}: list 2 to {n - 1} of "
                f"{path}'s experts, which are 0 to {n - 1}",
                "QK-E203",
            )


def _check_routing(source: Source, n: int, lists: ExpertLists) -> None:
    size = len(next(iter(lists.values())))
    used = source.get(f"{source.get('general.architecture', '')}.expert_used_count", 0)
    most, groups = max(used) if isinstance(used, list) else int(used), group_count(source)
    if most > size:
        raise RecipeError(
            f"{source.paths[0]}: {most} experts are used for a token, so no layer can have {size}", "QK-E203"
        )
    if groups == 1:
        return
    share, used_groups = size // groups, max(1, _key(source, "expert_group_used_count", 1))
    if size % groups or share < 2 or share * used_groups < most:
        raise RecipeError(
            f"{source.paths[0]}: {size} experts in {groups} groups, of which {used_groups} are used: every group must "
            f"have as many, at least 2, and together {most} for a token",
            "QK-E203",
        )
    for layer, experts in lists.items():
        counts = [sum(e * groups // n == group for e in experts) for group in range(groups)]
        if set(counts) != {share}:
            raise RecipeError(f"layer {layer}: {counts} experts of the {groups} groups: {share} of each", "QK-E203")


def _check_type(source: Source, tensor: TensorInfo) -> None:
    t, n_dims = tensor.type, len(tensor.shape)
    rows = tensor.shape[1] if n_dims > 2 else 1
    mixes = (n_dims < 2 and t.block > 1) or rows % t.interleave or decoded_as(t) is not t
    if mixes or tensor.nbytes != t.tensor_bytes(tensor.shape) or tensor.nbytes % tensor.shape[-1]:
        raise RecipeError(
            f"{source.where(tensor)}: tensor {tensor.name} is {t}, whose bytes do not belong to single experts: "
            "quantize it to another type first",
            "QK-E211",
        )


def _fields(source: Source, n: int, lists: ExpertLists, criterion: str) -> dict[str, Field]:
    metadata = Metadata(source.fields.values())
    metadata.remove(*_STALE_KEYS)
    count = metadata.get(f"{source.get('general.architecture', '')}.expert_count")
    if count is not None:
        metadata.replace(Field.of(count.key, len(next(iter(lists.values()))), count.type))
    if fill_record := metadata.get(_FILLED_KEY):
        metadata.replace(
            Field.of(_FILLED_KEY, list(_renumbered_fill(fill_record.value, lists)), ValueType.ARRAY, ValueType.STRING)
        )
    original = _record(source)
    lines = [
        f"blk.{layer}: {' '.join(str(original[layer][e] if layer in original else e) for e in experts)}"
        for layer, experts in sorted(lists.items())
    ]
    metadata.set(Field.of(EXPERTS_KEY, lines, ValueType.ARRAY, ValueType.STRING))
    if not original:
        metadata.set(Field.of(COUNT_KEY, n, ValueType.UINT32))
    metadata.set(Field.of(BY_KEY, criterion))
    return {field.key: field for field in metadata.fields()}


def _renumbered_fill(lines: Sequence[str], lists: ExpertLists) -> Iterator[str]:
    """Yield the lines of filled experts ("blk.3.ffn_up_exps.weight: 4 9") with the new numbers."""
    for line in lines:
        name, _, numbers = line.rpartition(": ")
        match = BY_EXPERT.fullmatch(name)
        experts = lists.get(int(match[1]), ()) if match else ()
        left = [str(experts.index(int(e))) for e in numbers.split() if int(e) in experts]
        if left or match is None:
            yield f"{name}: {' '.join(left)}" if match else line
