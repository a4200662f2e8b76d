"""What may be chosen: units of groups that have one type, and what each type makes of them in bytes, time and quality.

Bytes are those that ``plan_quantize`` gives, so fallbacks of rows that do not divide, merged experts and the padding
between tensors are in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline.facts import half_names, layer_of
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.presets import is_target, preset_by_name
from quantkit.pipeline.recipe import Rule
from quantkit.pipeline.runtimes import runtimes
from quantkit.pipeline.source import Source
from quantkit.quantize import QuantizeOptions, plan_from
from quantkit.recipes import rules_for
from quantkit.search.combine import fitted, measured_together
from quantkit.search.options import SearchOptions
from quantkit.search.predict import Predictor
from quantkit.search.restrict import Allowed, named_type, tied
from quantkit.sensitivity.file import Group, Sensitivity
from quantkit.types import TensorType
from quantkit.units import round_up

#: Tensors of which a token reads one row.
_ROWS = ("token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight")


@dataclass(frozen=True)
class Part:
    """What tensors come to: bytes in the file, padded; of data; read for a token; seconds that takes."""

    padded: int = 0
    data: int = 0
    read: int = 0
    seconds: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(
            self.padded + other.padded, self.data + other.data, self.read + other.read, self.seconds + other.seconds
        )


@dataclass(frozen=True)
class Choice:
    """A type for a unit: its divergence, its ``error``, which adds up (``Combination``), what it comes to, and the type
    of each tensor, by name. ``flips``: the part of the divergence that goes with the size of the error, and
    ``squares``: the sum of the squares of this part, of each group of the unit.
    """

    type: TensorType
    kld: float
    error: float
    part: Part
    types: Mapping[str, TensorType]
    flips: float = 0.0
    squares: float = 0.0


@dataclass(frozen=True)
class Unit:
    """Groups that have one type, and the types they may have, smallest first."""

    groups: tuple[Group, ...]
    choices: tuple[Choice, ...]

    @property
    def name(self) -> str:
        return "+".join(group.name for group in self.groups)


@dataclass
class Space:
    """All allocations of a model: a choice of each unit. ``fixed``: what the other tensors come to."""

    sensitivity: Sensitivity
    source: Source
    options: SearchOptions
    units: tuple[Unit, ...] = field(init=False)
    fixed: Part = field(init=False)
    notes: list[str] = field(default_factory=list)
    #: Groups by name that become one tensor, merged experts.
    _pairs: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        options.check()
        self.groups = self.sensitivity.groups
        _check_model(self.sensitivity, self.source)
        self.predictor = Predictor(self.sensitivity, feedback=options.feedback is not None, proxy=options.proxy)
        # Files of one type are measured without error feedback, so the rule is fitted to costs without it.
        plain = Predictor(self.sensitivity, proxy=options.proxy) if options.feedback is not None else self.predictor
        self.combination = fitted(measured_together(self.sensitivity), plain.filled)
        self.by_squares = any(cost.flips for cost in self.sensitivity.costs)
        self.allowed = Allowed(self.groups, options.allow, options.at_least, options.at_most)
        self.types = self._types()
        self.tree = self._tree()
        wanted = {group.name: self._wanted(group) for group in self.groups}
        planned = {t: self._by_group(t, [g for g in self.groups if t in wanted[g.name]]) for t in self._used(wanted)}
        self.fixed = self._fixed(self._planned(None, ()))
        lists = tied(self.groups, self._same, dict.fromkeys(self._pairs))
        self.units = tuple(self._unit(groups, wanted, planned) for groups in lists)

    # --- types ---

    def _types(self) -> tuple[TensorType, ...]:
        """Return what groups may become unless --allow says otherwise."""
        known = self.predictor.types
        if not known:
            raise RecipeError("the file of sensitivities has no costs: run `quantkit sensitivity` with --types")
        named = [named_type(name, "--types") for name in self.options.types]
        for t in (*named, *(t for r in self.allowed.allow for t in r.types)):
            if not is_target(t) or t.is_quantized and not has_encoder(t):
                raise RecipeError(f"{t} cannot be quantized to; `quantkit types` lists what can")
            if t.is_quantized and t not in known:
                have = ", ".join(map(str, known))
                raise RecipeError(f"{t} was not measured, only {have}: run `quantkit sensitivity --types {t}`")
            if lacks := self._lack(t):
                raise RecipeError(f"{lacks} has no {t}: leave it out, or change --runtime")
        if named:
            return tuple(dict.fromkeys(named))
        found = tuple(t for t in known if not self._lack(t))
        if not found:
            have = ", ".join(map(str, known))
            raise RecipeError(f"--runtime {self.options.runtime} loads none of the measured types: {have}")
        if left := [str(t) for t in known if t not in found]:
            self.notes.append(f"--runtime {self.options.runtime}: without {', '.join(left)}")
        return found

    def _lack(self, t: TensorType) -> str:
        """Return the runtime that is to load the file and lacks a type."""
        wanted = self.options.runtime
        trees = {"mainline": ("mainline",), "ik": ("ik",), "both": ("mainline", "ik")}.get(wanted or "", ())
        names = {"mainline": "llama.cpp", "ik": "ik_llama.cpp"}
        return next((names[tree] for tree in trees if t.trees not in (tree, "both")), "")

    def _tree(self) -> str:
        """Return whose rules apply, "mainline" or "ik"."""
        trees = {t.trees for t in (*self.types, *(t for r in self.allowed.allow for t in r.types))}
        if {"mainline", "ik"} <= trees:
            only = {tree: ", ".join(t.name for t in self.types if t.trees == tree) for tree in ("mainline", "ik")}
            raise RecipeError(
                f"no runtime loads all of these: only llama.cpp has {only['mainline']}, only ik_llama.cpp "
                f"{only['ik']}; choose with --runtime or --types"
            )
        return "ik" if "ik" in trees or self.options.runtime == "ik" else "mainline"

    def _wanted(self, group: Group) -> tuple[TensorType, ...]:
        """Return the types of a group for which there is a cost."""
        asked = self.allowed.types(group, self.types)
        found = tuple(t for t in asked if self._kld(group, t) is not None)
        if found:
            return found
        reasons = "; ".join(self.allowed.reasons(group)) or f"of {', '.join(map(str, asked))} none was measured"
        raise RecipeError(f"{group.name} can have no type: {reasons}")

    def _kld(self, group: Group, t: TensorType) -> float | None:
        """Return what a type costs; nothing if the tensors are of that type already."""
        if all(self.source.tensors[name].type is t for name in group.tensors):
            return 0.0
        return self.predictor.kld(group.name, t)

    def _used(self, wanted: Mapping[str, Sequence[TensorType]]) -> tuple[TensorType, ...]:
        return tuple(dict.fromkeys(t for types in wanted.values() for t in types))

    @property
    def _same(self) -> tuple[str, ...]:
        return self.options.same + (("up,gate",) if self.options.merge_up_gate else ())

    # --- bytes ---

    def _planned(self, t: TensorType | None, groups: Iterable[Group]) -> list[PlannedTensor]:
        """Return the tensors of a file in which ``groups`` are ``t`` and all else is as it was."""
        names = [re.escape(name) for group in groups for name in group.tensors]
        rules = () if t is None else (Rule(rf"^(?:{'|'.join(names)})$", t, "search"),)
        return list(self.bare(rules).tensors)

    def bare(self, rules: Sequence[Rule] = ()) -> Plan:
        """Return a plan in which all is as it was but for ``rules``; feedback counts only if types need it."""
        options, path = self.quantize_options("COPY", rules), Path("search.gguf")
        try:
            return plan_from(self.source, path, "COPY", replace(options, feedback=None))
        except RecipeError:
            if options.feedback is None:
                raise
            return plan_from(self.source, path, "COPY", options)

    def _by_group(self, t: TensorType, groups: Sequence[Group]) -> dict[str, list[PlannedTensor]]:
        """Return the tensors that groups become as ``t``; one made of two groups is of the first."""
        found: dict[str, list[PlannedTensor]] = {group.name: [] for group in self.groups}
        for tensor in self._planned(t, groups):
            owners = self._owners(tensor)
            if owners:
                found[owners[0]].append(tensor)
            if len(owners) == 2:
                self._pairs.append((owners[0], owners[1]))
        return found

    def plan(self, type_name: str, rules: Sequence[Rule], output: Path | None = None) -> Plan:
        """Return the plan of a file by rules."""
        options = self.quantize_options(type_name, rules)
        return plan_from(self.source, output or Path("search.gguf"), type_name, options)

    def quantize_options(self, type_name: str, rules: Sequence[Rule] = ()) -> QuantizeOptions:
        """Return the options of quantize for a file whose TYPE is ``type_name``."""
        given = self.options
        by_itself = preset_by_name(type_name).trees == "ik"
        return QuantizeOptions(
            ready_rules=tuple(rules),
            rules="ik" if self.tree == "ik" and not by_itself else None,
            imatrix=given.imatrix,
            feedback=given.feedback,
            merge_up_gate=given.merge_up_gate,
            allow_requantize=given.allow_requantize,
        )

    def _owners(self, tensor: PlannedTensor) -> list[str]:
        """Return the groups of a planned tensor: two if it is made of both halves of experts."""
        names = [tensor.name] if tensor.name in self._group_of else half_names(tensor.name) or ()
        return list(dict.fromkeys(self._group_of[name] for name in names if name in self._group_of))

    @cached_property
    def _group_of(self) -> dict[str, str]:
        return {name: group.name for group in self.groups for name in group.tensors}

    def _fixed(self, tensors: Iterable[PlannedTensor]) -> Part:
        """Return what the tensors of no group come to. ``kept``: those of which a rule must say that they stay."""
        rest = [t for t in tensors if not self._owners(t)]
        self.kept = {
            t.name: t.type for t in rest if len(t.shape) > 1 and self._has_encoded(t.name) and is_target(t.type)
        }
        large = [t for t in rest if t.name in self.kept]
        if large:
            names = f"{large[0].name} and {len(large) - 1} more" if len(large) > 1 else large[0].name
            self.notes.append(f"{names}: not measured, left in the type of the source")
        return sum(map(self.part, rest), Part())

    def _has_encoded(self, name: str) -> bool:
        """Tell whether a preset would encode a tensor."""
        return name in self._encoded

    @cached_property
    def _encoded(self) -> frozenset[str]:
        plans = (self.plan(name, ()) for name in ("Q8_0", "Q4_0"))  # what is in one of them already is copied by it
        return frozenset(t.name for plan in plans for t in plan.tensors if t.encoder)

    def part(self, tensor: PlannedTensor) -> Part:
        share = self._share(tensor)
        read = -(-tensor.nbytes * share.numerator // share.denominator)
        speeds = self.options.speeds
        seconds = read / 1e9 / speeds.get(tensor.type.name, min(speeds.values())) if speeds else 0.0
        return Part(round_up(tensor.nbytes, self._alignment), tensor.nbytes, read, seconds)

    @cached_property
    def _alignment(self) -> int:
        return int(self.source.get("general.alignment", 32))

    def _share(self, tensor: PlannedTensor) -> Fraction:
        """Return which share of a tensor is read for a token: of experts those used, of embeddings a row."""
        if tensor.name in _ROWS:
            rows = Fraction(1, max(1, math.prod(tensor.shape[1:])))
            tied_output = tensor.name == "token_embd.weight" and "output.weight" not in self.source.tensors
            return rows + (1 if tied_output else 0)
        if "_exps." not in tensor.name or len(tensor.shape) < 3:
            return Fraction(1)
        used = self._experts_used
        if isinstance(used, list):
            layer = layer_of(tensor.name)
            used = used[layer] if 0 <= layer < len(used) else None
        n = tensor.shape[2]
        return Fraction(used, n) if isinstance(used, int) and 0 < used <= n else Fraction(1)

    @cached_property
    def _experts_used(self) -> Any:
        return self.source.get(f"{self.source.get('general.architecture')}.expert_used_count")

    # --- units ---

    def _unit(
        self,
        groups: Sequence[Group],
        wanted: Mapping[str, Sequence[TensorType]],
        planned: Mapping[TensorType, Mapping[str, list[PlannedTensor]]],
    ) -> Unit:
        common = [t for t in wanted[groups[0].name] if all(t in wanted[g.name] for g in groups)]
        if not common:
            each = "; ".join(f"{g.name}: {', '.join(map(str, wanted[g.name]))}" for g in groups)
            raise RecipeError(f"these are to have one type, but have none in common: {each}")
        choices = []
        for t in common:
            tensors = [p for group in groups for p in planned[t][group.name]]
            types = {name: p.type for p in tensors for name in (half_names(p.name) or (p.name,))}
            types = {name: types[name] for group in groups for name in group.tensors if name in types} or types
            kept = all(p.type is part.source.type for p in tensors for part in p.parts)
            klds = [0.0 if kept else self._kld(group, t) or 0.0 for group in groups]
            error = math.fsum(map(self.combination.part, klds))
            flips = [k * self.predictor.flips(g.name, t) for k, g in zip(klds, groups, strict=True)]
            squares = math.fsum(each**2 for each in flips)
            part = sum(map(self.part, tensors), Part())
            choices.append(Choice(t, math.fsum(klds), error, part, types, math.fsum(flips), squares))
        return Unit(tuple(groups), tuple(sorted(choices, key=lambda c: (c.part.data, c.error))))

    # --- allocations ---

    def rules(self, picks: Sequence[int]) -> tuple[Rule, ...]:
        """Return the rules that give every tensor its type."""
        types: dict[str, TensorType] = dict(self.kept)
        for unit, pick in zip(self.units, picks, strict=True):
            types |= unit.choices[pick].types
        others = [name for name in self.source.tensors if name not in types]
        return tuple(Rule(pattern, t, "search") for pattern, t in rules_for(types, others=others))

    def total(self, picks: Sequence[int]) -> Part:
        """Return what all tensors come to."""
        return sum((u.choices[pick].part for u, pick in zip(self.units, picks, strict=True)), self.fixed)

    def kld(self, picks: Sequence[int]) -> float:
        """Return the predicted divergence."""
        choices = [u.choices[pick] for u, pick in zip(self.units, picks, strict=True)]
        if self.by_squares:
            return math.fsum(c.kld - c.flips for c in choices) + math.sqrt(math.fsum(c.squares for c in choices))
        return self.combination.total(math.fsum(c.error for c in choices))

    def together(self, parts: Sequence[tuple[float, float]]) -> float:
        """Return what groups come to, each with its divergence alone and what flips make of that."""
        if self.by_squares:
            return math.fsum(kld - flips for kld, flips in parts) + math.hypot(*(flips for _, flips in parts))
        return self.combination.total(math.fsum(self.combination.part(kld) for kld, _ in parts))

    def title(self, picks: Sequence[int]) -> str:
        """Return the type of most values, which TYPE is then."""
        values: dict[str, int] = {}
        for unit, pick in zip(self.units, picks, strict=True):
            choice = unit.choices[pick]
            for group in unit.groups:
                for name, shape in group.tensors.items():
                    t = choice.types.get(name, choice.type)
                    values[t.name] = values.get(t.name, 0) + math.prod(shape)
        return max(values, key=lambda name: (values[name], name))

    def loads(self, plan: Plan) -> tuple[str, ...]:
        """Return what runtimes make of a file, a line each."""
        arch = str(self.source.get("general.architecture"))
        return tuple(f"{r.name} {r}" for r in runtimes(arch, [(t.name, t.type) for t in plan.tensors]))

    def without(self, **changes: Any) -> Space:
        """Return the space of other options."""
        return Space(self.sensitivity, self.source, replace(self.options, **changes))


def _check_model(sensitivity: Sensitivity, source: Source) -> None:
    """Raise RecipeError if the costs are another model's."""
    path = source.paths[0]
    told = str(sensitivity.model.get("name") or sensitivity.model.get("path") or "another model")
    if not sensitivity.groups:
        raise RecipeError(f"the file of sensitivities, of {told}, has no groups")
    seen: set[str] = set()
    for group in sensitivity.groups:
        for name, shape in group.tensors.items():
            there = source.tensors.get(name)
            if there is None:
                raise RecipeError(f"{path}: there is no {name}, which was measured: the sensitivities are of {told}")
            if _dims(there.shape) != _dims(shape):
                raise RecipeError(
                    f"{path}: {name} is {list(there.shape)}, but {list(shape)} was measured: the sensitivities are "
                    f"of {told}"
                )
            if name in seen:
                raise RecipeError(f"the file of sensitivities has {name} in two groups")
            seen.add(name)
    measured = sensitivity.model.get("fingerprint")
    if isinstance(measured, str) and measured != source.fingerprint():
        raise RecipeError(f"{path} has other weights than {told}, whose sensitivities were measured")


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without trailing ones."""
    n = max((i + 1 for i, size in enumerate(shape) if size != 1), default=0)
    return tuple(shape[:n])
