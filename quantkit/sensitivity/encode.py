"""The groups of a model, and their rows in every type, encoded by the jobs of ``quantize`` into files.

The bytes come from a plan of ``quantize`` (COPY, with a rule for every measured tensor), so importance, error feedback
and the cache of encoded tensors apply as they do there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.formats.gguf import open_model
from quantkit.formats.gguf.mmproj import check_language_model
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.ranges import U8, write_range
from quantkit.kernels import dequantize
from quantkit.kernels.first_run import compile_in_order
from quantkit.kernels.formats import has_encoder
from quantkit.kernels.interleave import is_interleaved
from quantkit.names import tensor_class
from quantkit.options.sensitivity import GROUPS
from quantkit.pipeline.cache.run_cache import RunCache
from quantkit.pipeline.cache.store import Store
from quantkit.pipeline.folded_source import scale_of
from quantkit.pipeline.importance import Importance, importance_requirement
from quantkit.pipeline.jobs import JOB, ErrorSums, Job, JobResult, cut_jobs
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.presets import is_target
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.source import Source
from quantkit.pipeline.warmup import kernel_calls
from quantkit.pipeline.worker import Worker, metrics_for
from quantkit.quantize import QuantizeOptions, plan_quantize
from quantkit.sensitivity.file import Group
from quantkit.sensitivity.variants import Overrides
from quantkit.types import BY_NAME, TensorType, type_by_name

_F32 = BY_NAME["F32"]
#: A type for rows of any usual length: a plan with it shows which tensors are encoded.
_PROBE = "F16"


class Pair(NamedTuple):
    """A group and a type that it is quantized to alone, perhaps with error feedback."""

    group: Group
    type: TensorType
    feedback: bool = False

    def __str__(self) -> str:
        return f"{self.group.name} {self.type}{' with feedback' if self.feedback else ''}"


class EncodedPair(NamedTuple):
    """Encoded tensors of a pair by name, the sums of their errors, and the same for each matrix, by tensor."""

    data: Overrides
    sums: ErrorSums
    matrix_sums: dict[str, list[ErrorSums]]


@dataclass(frozen=True)
class Encoding:
    """Options of ``quantize`` that the encoded bytes depend on."""

    imatrix: Path | None = None
    feedback: Path | None = None
    allow_requantize: bool = False

    def plan(self, model: Path, names: Iterable[str], t: TensorType | str, *, feedback: bool = False) -> Plan:
        """Return the plan of a copy of ``model`` in which tensors have type ``t``."""
        pattern = "|".join(re.escape(name) for name in names)
        options = QuantizeOptions(
            imatrix=self.imatrix,
            feedback=self.feedback if feedback else None,
            allow_requantize=self.allow_requantize,
            tensor_type=(f"^({pattern})$={t}",),
        )
        return plan_quantize(model, model.with_name("sensitivity-of-groups.gguf"), "COPY", options)


def measurable_types(names: Sequence[str]) -> tuple[TensorType, ...]:
    """Return types by name, without repetitions. Raises TypeNotSupported for types that cannot be measured."""
    types = tuple(dict.fromkeys(type_by_name(name) for name in names))
    for t in types:
        if not is_target(t) or not has_encoder(t):
            raise TypeNotSupported(f"{t} is not a type to quantize to; `quantkit types` lists those", "QK-E302")
        if is_interleaved(t):
            raise TypeNotSupported(
                f"{t} has the same values as its type without interleaving: measure that type", "QK-E203"
            )
    if not types:
        raise RecipeError("no types to measure: give some (--types Q4_K,Q6_K)", "QK-E202")
    return types


def groups_of(model: Path, encoding: Encoding, grouping: str) -> tuple[Group, ...]:
    """Return the groups of a model: the tensors of a class in a layer, those of a class in all layers, or each tensor.

    ``by``: ``class-layer``, ``class`` or ``tensor``.
    """
    if grouping not in GROUPS:
        raise RecipeError(f"unknown grouping {grouping}: choose one of {', '.join(GROUPS)}", "QK-E203")
    with open_model(model) as source:
        check_language_model(source)
        scaled = next((t.name for t in source.tensors.values() if scale_of(source, t) is not None), None)
        if scaled is not None:
            raise TypeNotSupported(
                f"{model}: {scaled} is NVFP4 with a scale, by which the model would multiply other types, too: measure "
                "the model from which it was quantized",
                "QK-E302",
            )
        plan = replace(encoding, imatrix=None, allow_requantize=True).plan(model, source.tensors, _PROBE)
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for t in plan.tensors:
        if t.type.name == _PROBE and len(t.shape) > 1:
            groups.setdefault(_group_name(t.name, grouping), {})[t.name] = t.shape
    if not groups:
        raise RecipeError(f"{model}: has no tensors that can be quantized", "QK-E214")
    return tuple(_group(name, tensors, grouping) for name, tensors in groups.items())


def _group_name(tensor: str, grouping: str) -> str:
    """Return the name of a tensor's group."""
    if grouping == "class":
        return tensor_class(tensor)
    return tensor if grouping == "tensor" else tensor.rpartition(".")[0]


def _group(name: str, tensors: dict[str, tuple[int, ...]], grouping: str) -> Group:
    first = next(iter(tensors))
    layer = re.match(r"blk\.(\d{1,9})\.", first) if grouping != "class" else None
    return Group(name, tensor_class(first), int(layer[1]) if layer else None, tensors)


def pairs_of(
    groups: Sequence[Group], types: Sequence[TensorType], encoding: Encoding
) -> tuple[list[Pair], dict[str, list[str]]]:
    """Return the pairs that can be measured, and the groups that cannot, by reason.

    Raises RecipeError if a type can be measured for no group.
    """
    importance = None if encoding.imatrix is None else Importance(read_imatrix(encoding.imatrix))
    pairs, left_out = list[Pair](), dict[str, list[str]]()
    for t in types:
        count = len(pairs)
        for group in groups:
            reason = next(
                (w for n, shape in group.tensors.items() if (w := _exclusion_reason(n, shape, t, importance))), None
            )
            if reason is None:
                pairs.append(Pair(group, t))
            else:
                left_out.setdefault(reason, []).append(group.name)
        if len(pairs) == count:
            reasons = "; ".join(reason for reason in left_out if str(t) in reason)
            raise RecipeError(f"{t} cannot be measured for any group: {reasons}", "QK-E206")
    return pairs, left_out


def _exclusion_reason(name: str, shape: Sequence[int], t: TensorType, importance: Importance | None) -> str | None:
    if shape[0] % t.block:
        return f"rows of {shape[0]} are not a multiple of {t}'s blocks of {t.block}"
    reason = importance_requirement(name, t)
    if reason is None or importance is not None and importance.lookup(name, shape).entry is not None:
        return None
    return f"{reason}: " + ("give --imatrix" if importance is None else "the importance matrix has no such entry")


class Encoder:
    """Encodes pairs with ``threads`` threads; reuses tensors from a cache."""

    def __init__(
        self, model: Path, pairs: Sequence[Pair], encoding: Encoding, threads: int, max_ram: int, store: Store | None
    ) -> None:
        self._threads = threads
        names: dict[tuple[TensorType, bool], list[str]] = {}
        for pair in pairs:
            names.setdefault((pair.type, pair.feedback), []).extend(pair.group.tensors)
        self._plans = {
            key: encoding.plan(model, tensor_names, key[0], feedback=key[1]) for key, tensor_names in names.items()
        }
        self._indices = {key: {t.name: i for i, t in enumerate(plan.tensors)} for key, plan in self._plans.items()}
        self._caches = {
            key: RunCache(store, plan, measure=True) for key, plan in self._plans.items() if store is not None
        }
        self._metrics = {key: metrics_for(plan.tensors, max_ram, threads) for key, plan in self._plans.items()}
        self._warm = set[tuple[TensorType, bool]]()

    @property
    def notes(self) -> list[str]:
        """Notes of the plans on error feedback, each once, with its types."""
        types_by_note: dict[str, list[str]] = {}
        for (t, feedback), plan in self._plans.items():
            for note in plan.feedback_notes if feedback else ():
                types_by_note.setdefault(note, []).append(t.name)
        return [f"{', '.join(types)}: {note}" for note, types in types_by_note.items()]

    def has_feedback(self, pair: Pair) -> bool:
        """Return whether any matrix of the pair has enough tokens for error feedback."""
        plan, indices = self._plans[pair.type, pair.feedback], self._indices[pair.type, pair.feedback]
        inputs = [part.inputs for name in pair.group.tensors for part in plan.tensors[indices[name]].parts]
        return any(item.damping(matrix) is not None for item in inputs if item for matrix in range(item.matrices))

    def encode(self, pair: Pair, folder: Path) -> EncodedPair:
        """Return the encoded tensors of a pair, memory-mapped from files in ``folder``."""
        key = (pair.type, pair.feedback)
        plan, sums = self._plans[key], ErrorSums()
        tensors = [plan.tensors[self._indices[key][name]] for name in pair.group.tensors]
        if key not in self._warm:
            compile_in_order(kernel_calls(tensors, True))
            self._warm.add(key)
        data: Overrides = {}
        matrix_sums: dict[str, list[ErrorSums]] = {}
        for number, tensor in enumerate(tensors):
            target = _Rows(folder / f"{number}.rows", tensor.offset)
            jobs = list(cut_jobs(self._indices[key][tensor.name], tensor, JOB))
            cache = self._caches.get(key)
            if cache is not None:
                jobs = cache.prepare(tensor, jobs, None)
            results = self._run(plan, target, jobs, key)
            if cache is not None:
                cache.add(tensor, results, None)
            tensor_sums = matrix_sums.setdefault(tensor.name, [ErrorSums()] * tensor.parts[0].matrices)
            for job, result in sorted(results, key=lambda item: item[0].target_offset):
                for piece in result.sums:
                    sums, tensor_sums[job.matrix] = sums + piece, tensor_sums[job.matrix] + piece
            t = tensor.type
            if tensor.parts[0].scale is not None:  # the model's graph has no product with it
                _decode_scaled(plan.source, tensor, target.path)
                t = _F32
            nbytes = t.tensor_bytes(tensor.shape)
            info = replace(tensor.source, name=tensor.name, type=t, nbytes=nbytes, offset=-1)
            data[tensor.name] = info, np.memmap(target.path, np.uint8, "r")
            target.path.unlink()  # the mapping keeps it until nothing refers to it
        return EncodedPair(data, sums, matrix_sums)

    def _run(
        self, plan: Plan, target: _Rows, jobs: Sequence[Job], key: tuple[TensorType, bool]
    ) -> list[tuple[Job, JobResult]]:
        shares = [jobs[i :: self._threads] for i in range(self._threads)]

        def work(share: Sequence[Job]) -> list[tuple[Job, JobResult]]:
            worker = Worker(plan.source, target, self._metrics[key], measure=True, readahead=1)
            return [(job, worker.run(job, plan.tensors[job.tensor])) for job in share]

        with ThreadPoolExecutor(self._threads) as pool:
            return [result for results in pool.map(work, [s for s in shares if s]) for result in results]

    def close(self) -> list[str]:
        """Record the run in the cache; return notes on cache hits."""
        uses = [cache.close() for cache in self._caches.values()]
        notes = list(dict.fromkeys(note for use in uses for note in use.notes))
        if n_cached := sum(use.hits for use in uses):
            notes.append(f"{n_cached} of {sum(use.tensors for use in uses)} encoded tensors came from the cache")
        return notes

    def drop(self) -> None:
        """Remove unfinished cache entries of a failed run."""
        for cache in self._caches.values():
            cache.drop()


def _decode_scaled(source: Source, tensor: PlannedTensor, path: Path) -> None:
    """Replace the rows of a tensor with scales, in a file, by their values in float32."""
    part = tensor.parts[0]
    assert part.scale is not None
    scales = np.empty(part.matrices, np.float32)
    source.read(part.scale, scales.view(np.uint8), 0)
    matrices = np.memmap(path, np.uint8, "r").reshape(part.matrices, part.rows, -1)
    path.unlink()  # the mapping keeps it
    with path.open("wb") as file:
        for rows, scale in zip(matrices, scales, strict=True):
            file.write((dequantize(np.ascontiguousarray(rows), tensor.type, part.values) * scale).tobytes())


class _Rows:
    """A plan's target: the rows of one tensor, in a file."""

    def __init__(self, path: Path, begin: int) -> None:
        self.path, self._begin = path, begin
        path.unlink(missing_ok=True)

    def write(self, shard: int, data: U8, offset: int) -> None:
        write_range(self.path, data, offset - self._begin, make=True)

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        return False

    def sync(self, shards: Iterable[int]) -> None:
        pass
