"""The groups of a model, and their rows in every type: encoded by the jobs of ``quantize``, into files of their own.

What decides a byte is a plan of ``quantize`` (COPY, with a rule for every tensor that is measured), so that importance,
error feedback and the cache of encoded tensors count as they do there.
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
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.ranges import U8, write_range
from quantkit.kernels.first_run import compile_together
from quantkit.kernels.formats import has_encoder
from quantkit.kernels.interleave import is_woven
from quantkit.names import tensor_class
from quantkit.pipeline.cache.store import Store
from quantkit.pipeline.cache.use import RunCache
from quantkit.pipeline.importance import Importance, must_have_importance
from quantkit.pipeline.jobs import JOB, ErrorSums, Job, JobResult, cut_jobs
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.presets import is_target
from quantkit.pipeline.warm import kernel_calls
from quantkit.pipeline.work import Worker, metrics_for
from quantkit.quantize import QuantizeOptions, plan_quantize
from quantkit.sensitivity.file import Group
from quantkit.sensitivity.variants import Held
from quantkit.types import TensorType, type_by_name

GROUPS = ("class-layer", "class", "tensor")
#: A type that takes rows of any usual length, by which a plan tells which tensors are encoded at all.
_PROBE = "F16"


class Pair(NamedTuple):
    """A group and a type that it is quantized to alone, perhaps with error feedback."""

    group: Group
    type: TensorType
    feedback: bool = False

    def __str__(self) -> str:
        return f"{self.group.name} {self.type}{' with feedback' if self.feedback else ''}"


class Encoded(NamedTuple):
    """The tensors of a pair as they are quantized, by name, and the sums of their errors; of each matrix, by tensor."""

    data: Held
    sums: ErrorSums
    of_matrices: dict[str, list[ErrorSums]]


@dataclass(frozen=True)
class Encoding:
    """How tensors are encoded: as ``quantize`` does with these options."""

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


def types_of(names: Sequence[str]) -> tuple[TensorType, ...]:
    """Return types by name, each once. Raises TypeNotSupported for those that nothing can be measured of."""
    found = tuple(dict.fromkeys(type_by_name(name) for name in names))
    for t in found:
        if not is_target(t) or not has_encoder(t):
            raise TypeNotSupported(f"{t} is not a type that weights are encoded in; `quantkit types` lists those")
        if is_woven(t):
            raise TypeNotSupported(f"{t} has the values of the type whose rows it interleaves: measure that one")
    if not found:
        raise RecipeError("there are no types to measure: name some (--types Q4_K,Q6_K)")
    return found


def groups_of(model: Path, encoding: Encoding, by: str) -> tuple[Group, ...]:
    """Return the groups of a model: the tensors of a class in a layer, those of a class in all layers, or each tensor.

    ``by``: ``class-layer``, ``class`` or ``tensor``.
    """
    if by not in GROUPS:
        raise RecipeError(f"groups by {by}: there are {', '.join(GROUPS)}")
    with open_model(model) as source:
        plan = replace(encoding, imatrix=None, allow_requantize=True).plan(model, source.tensors, _PROBE)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for t in plan.tensors:
        if t.type.name == _PROBE and len(t.shape) > 1:
            found.setdefault(_group_of(t.name, by), {})[t.name] = t.shape
    if not found:
        raise RecipeError(f"{model}: it has no tensors that can be quantized")
    return tuple(_group(name, tensors, by) for name, tensors in found.items())


def _group_of(tensor: str, by: str) -> str:
    """Return the name of a tensor's group."""
    if by == "class":
        return tensor_class(tensor)
    return tensor if by == "tensor" else tensor.rpartition(".")[0]


def _group(name: str, tensors: dict[str, tuple[int, ...]], by: str) -> Group:
    first = next(iter(tensors))
    layer = re.match(r"blk\.(\d+)\.", first) if by != "class" else None
    return Group(name, tensor_class(first), int(layer[1]) if layer else None, tensors)


def pairs_of(
    groups: Sequence[Group], types: Sequence[TensorType], encoding: Encoding
) -> tuple[list[Pair], dict[str, list[str]]]:
    """Return what can be measured, and why the rest cannot: groups, by reason.

    Raises RecipeError if a type can be measured of no group.
    """
    importance = None if encoding.imatrix is None else Importance(read_imatrix(encoding.imatrix))
    pairs, left_out = list[Pair](), dict[str, list[str]]()
    for t in types:
        count = len(pairs)
        for group in groups:
            why = next((w for n, shape in group.tensors.items() if (w := _why_not(n, shape, t, importance))), None)
            if why is None:
                pairs.append(Pair(group, t))
            else:
                left_out.setdefault(why, []).append(group.name)
        if len(pairs) == count:
            reasons = "; ".join(why for why in left_out if str(t) in why)
            raise RecipeError(f"{t} can be measured of no group: {reasons}")
    return pairs, left_out


def _why_not(name: str, shape: Sequence[int], t: TensorType, importance: Importance | None) -> str | None:
    if shape[0] % t.block:
        return f"rows of {shape[0]} do not divide into {t}'s blocks of {t.block}"
    why = must_have_importance(name, t)
    if why is None or importance is not None and importance.lookup(name, shape).entry is not None:
        return None
    return f"{why}: " + ("give --imatrix" if importance is None else "the importance matrix has no such entry")


class Encoder:
    """Encodes pairs, with as many threads; what is kept in a cache is taken from there."""

    def __init__(
        self, model: Path, pairs: Sequence[Pair], encoding: Encoding, threads: int, max_ram: int, store: Store | None
    ) -> None:
        self._threads = threads
        names: dict[tuple[TensorType, bool], list[str]] = {}
        for pair in pairs:
            names.setdefault((pair.type, pair.feedback), []).extend(pair.group.tensors)
        self._plans = {key: encoding.plan(model, each, key[0], feedback=key[1]) for key, each in names.items()}
        self._at = {key: {t.name: i for i, t in enumerate(plan.tensors)} for key, plan in self._plans.items()}
        self._caches = {
            key: RunCache(store, plan, measure=True) for key, plan in self._plans.items() if store is not None
        }
        self._metrics = {key: metrics_for(plan.tensors, max_ram, threads) for key, plan in self._plans.items()}
        self._warm = set[tuple[TensorType, bool]]()

    @property
    def notes(self) -> list[str]:
        """What the plans have to say about error feedback, each once, with the types it is said of."""
        found: dict[str, list[str]] = {}
        for (t, fed), plan in self._plans.items():
            for note in plan.notes:
                if fed and "feedback" in note:
                    found.setdefault(note, []).append(t.name)
        return [f"{', '.join(types)}: {note}" for note, types in found.items()]

    def is_fed(self, pair: Pair) -> bool:
        """Tell whether error feedback changes a pair: of one of its matrices at least there are enough tokens."""
        plan, at = self._plans[pair.type, pair.feedback], self._at[pair.type, pair.feedback]
        found = [part.inputs for name in pair.group.tensors for part in plan.tensors[at[name]].parts]
        return any(each.damping(matrix) is not None for each in found if each for matrix in range(each.matrices))

    def encode(self, pair: Pair, folder: Path) -> Encoded:
        """Return the encoded tensors of a pair, in files of ``folder`` that are mapped."""
        key = (pair.type, pair.feedback)
        plan, sums = self._plans[key], ErrorSums()
        tensors = [plan.tensors[self._at[key][name]] for name in pair.group.tensors]
        if key not in self._warm:
            compile_together(kernel_calls(tensors, True))
            self._warm.add(key)
        data: Held = {}
        of_matrices: dict[str, list[ErrorSums]] = {}
        for number, tensor in enumerate(tensors):
            target = _Rows(folder / f"{number}.rows", tensor.offset)
            jobs = list(cut_jobs(self._at[key][tensor.name], tensor, JOB))
            cache = self._caches.get(key)
            if cache is not None:
                jobs = cache.prepare(tensor, jobs, None)
            results = self._run(plan, target, jobs, key)
            if cache is not None:
                cache.keep(tensor, results, None)
            of_each = of_matrices.setdefault(tensor.name, [ErrorSums()] * tensor.parts[0].matrices)
            for job, result in sorted(results, key=lambda each: each[0].target_offset):
                for piece in result.sums:
                    sums, of_each[job.matrix] = sums + piece, of_each[job.matrix] + piece
            info = replace(tensor.source, name=tensor.name, type=tensor.type, nbytes=tensor.nbytes, offset=-1)
            data[tensor.name] = info, np.memmap(target.path, np.uint8, "r")
            target.path.unlink()  # mapped it stays, until nothing holds it
        return Encoded(data, sums, of_matrices)

    def _run(
        self, plan: Plan, target: _Rows, jobs: Sequence[Job], key: tuple[TensorType, bool]
    ) -> list[tuple[Job, JobResult]]:
        shares = [jobs[i :: self._threads] for i in range(self._threads)]

        def work(share: Sequence[Job]) -> list[tuple[Job, JobResult]]:
            worker = Worker(plan.source, target, self._metrics[key], measure=True, ahead=1)
            return [(job, worker.run(job, plan.tensors[job.tensor])) for job in share]

        with ThreadPoolExecutor(self._threads) as pool:
            return [each for found in pool.map(work, [s for s in shares if s]) for each in found]

    def close(self) -> list[str]:
        """Note the run in the cache; return what there is to say about it."""
        uses = [cache.close() for cache in self._caches.values()]
        found = list(dict.fromkeys(note for use in uses for note in use.notes))
        if taken := sum(use.taken for use in uses):
            found.append(f"{taken} of {sum(use.tensors for use in uses)} encoded tensors came from the cache")
        return found

    def drop(self) -> None:
        """Remove what a run that failed left unfinished in the cache."""
        for cache in self._caches.values():
            cache.drop()


class _Rows:
    """A target that has the rows of one tensor, in a file of their own."""

    def __init__(self, path: Path, begin: int) -> None:
        self.path, self._begin = path, begin
        path.unlink(missing_ok=True)

    def write(self, shard: int, data: U8, offset: int) -> None:
        write_range(self.path, data, offset - self._begin, make=True)

    def copy(self, shard: int, file: Path, begin: int, offset: int, nbytes: int) -> bool:
        return False

    def sync(self, shards: Iterable[int]) -> None:
        pass
