"""``Space``: the choices of a search, types for groups of tensors, with their bytes, read time and divergence.

Bytes are those of ``plan_quantize``: they include fallbacks of rows that are not a multiple of blocks, merged experts
and the padding between tensors.
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
from quantkit.formats.gguf.mmproj import check_language_model
from quantkit.kernels.formats import has_encoder
from quantkit.options.search import SearchOptions
from quantkit.pipeline.facts import half_names, layer_of
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.presets import is_target, preset_by_name
from quantkit.pipeline.recipe import Rule
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.runtimes import runtimes
from quantkit.pipeline.source import Source
from quantkit.quantize import QuantizeOptions, plan_from
from quantkit.recipes import rules_for
from quantkit.search.combine import fit_combination, read_measured_allocations
from quantkit.search.predict import Predictor
from quantkit.search.restrict import Restrictions, option_type, tie_groups
from quantkit.sensitivity.file import Group, Sensitivity
from quantkit.types import TensorType
from quantkit.units import round_up

#: Embeddings, of which a token reads one row.
_ROWS = ("token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight")


@dataclass(frozen=True)
class Footprint:
    """Cost of tensors: bytes with padding, bytes of data, bytes read per token, and seconds of that read."""

    padded: int = 0
    data: int = 0
    read: int = 0
    seconds: float = 0.0

    def __add__(self, addend: Footprint) -> Footprint:
        return Footprint(
            self.padded + addend.padded, self.data + addend.data, self.read + addend.read, self.seconds + addend.seconds
        )


@dataclass(frozen=True)
class Choice:
    """A type for a choice group.

    ``kld``: divergence, in nats; ``error``: its additive part (``Combination``); ``types``: the type of each tensor, by
    name. ``flips``: the part of the divergence that is proportional to the error; ``squares``: the sum of its
    squares over the groups. ``tensors``: those of the file.
    """

    type: TensorType
    kld: float
    error: float
    footprint: Footprint
    types: Mapping[str, TensorType]
    flips: float = 0.0
    squares: float = 0.0
    tensors: tuple[PlannedTensor, ...] = ()


@dataclass(frozen=True)
class ChoiceGroup:
    """Groups that get the same type, and the candidates, smallest first."""

    groups: tuple[Group, ...]
    choices: tuple[Choice, ...]

    @property
    def name(self) -> str:
        return "+".join(group.name for group in self.groups)


@dataclass
class Space:
    """All allocations of a model: a choice of each choice group. ``fixed``: footprint of the other tensors."""

    sensitivity: Sensitivity
    source: Source
    options: SearchOptions
    choice_groups: tuple[ChoiceGroup, ...] = field(init=False)
    fixed: Footprint = field(init=False)
    notes: list[str] = field(default_factory=list)
    #: Names of two groups that become one tensor, merged experts.
    _merged_pairs: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        options.check()
        self.groups = self.sensitivity.groups
        _check_model(self.sensitivity, self.source)
        self.predictor = Predictor(self.sensitivity, feedback=options.feedback is not None, proxy=options.proxy)
        # Files of one type are measured without error feedback, so the rule is fitted to costs without it.
        base_predictor = (
            Predictor(self.sensitivity, proxy=options.proxy) if options.feedback is not None else self.predictor
        )
        self.combination = fit_combination(read_measured_allocations(self.sensitivity), base_predictor.extrapolated_kld)
        self.quadrature = any(cost.flips for cost in self.sensitivity.costs)
        self.restrictions = Restrictions(self.groups, options.allow, options.at_least, options.at_most)
        self.types = self._types()
        self.tree = self._tree()
        candidate_types = {group.name: self._candidate_types(group) for group in self.groups}
        tensors_by_type = {
            t: self._tensors_by_group(t, [g for g in self.groups if t in candidate_types[g.name]])
            for t in self._all_types(candidate_types)
        }
        self.fixed = self._fixed_footprint(self._plan_tensors(None, ()))
        tied_groups = tie_groups(self.groups, self._tied_classes, dict.fromkeys(self._merged_pairs))
        self.choice_groups = tuple(
            self._choice_group(groups, candidate_types, tensors_by_type) for groups in tied_groups
        )

    # --- types ---

    def _types(self) -> tuple[TensorType, ...]:
        """Return the candidates of groups without --allow."""
        measured_types = self.predictor.types
        if not measured_types:
            raise RecipeError(
                "the file of sensitivities has no costs: run `quantkit sensitivity` with --types", "QK-E214"
            )
        option_types = [option_type(name, "--types") for name in self.options.types]
        for t in (*option_types, *(t for r in self.restrictions.allow for t in r.types)):
            if not is_target(t) or t.is_quantized and not has_encoder(t):
                raise RecipeError(f"{t} is not a type to quantize to; `quantkit types` lists those", "QK-E302")
            if t.is_quantized and t not in measured_types:
                type_names = ", ".join(map(str, measured_types))
                raise RecipeError(
                    f"{t} was not measured, only {type_names}: run `quantkit sensitivity --types {t}`", "QK-E203"
                )
            if runtime := self._runtime_without(t):
                raise RecipeError(f"{runtime} does not support {t}: omit it, or change --runtime", "QK-E203")
        if option_types:
            return tuple(dict.fromkeys(option_types))
        loadable = tuple(t for t in measured_types if not self._runtime_without(t))
        if not loadable:
            type_names = ", ".join(map(str, measured_types))
            raise RecipeError(
                f"--runtime {self.options.runtime} loads none of the measured types: {type_names}", "QK-E203"
            )
        if unloadable := [str(t) for t in measured_types if t not in loadable]:
            self.notes.append(f"--runtime {self.options.runtime} excludes {', '.join(unloadable)}")
        return loadable

    def _runtime_without(self, t: TensorType) -> str:
        """Return the runtime of --runtime that lacks a type; "" if none does."""
        option = self.options.runtime
        trees = {"mainline": ("mainline",), "ik": ("ik",), "both": ("mainline", "ik")}.get(option or "", ())
        names = {"mainline": "llama.cpp", "ik": "ik_llama.cpp"}
        return next((names[tree] for tree in trees if not t.is_in(tree)), "")

    def _tree(self) -> str:
        """Return the project whose type rules apply, "mainline" or "ik"."""
        trees = {t.trees for t in (*self.types, *(t for r in self.restrictions.allow for t in r.types))}
        if {"mainline", "ik"} <= trees:
            names = {tree: ", ".join(t.name for t in self.types if t.trees == tree) for tree in ("mainline", "ik")}
            raise RecipeError(
                f"no runtime loads all of these: only llama.cpp has {names['mainline']}, only ik_llama.cpp "
                f"{names['ik']}; choose with --runtime or --types",
                "QK-E203",
            )
        return "ik" if "ik" in trees or self.options.runtime == "ik" else "mainline"

    def _candidate_types(self, group: Group) -> tuple[TensorType, ...]:
        """Return the permitted types of a group whose divergence is known. Raises RecipeError if there is none."""
        permitted = self.restrictions.types(group, self.types)
        candidates = tuple(t for t in permitted if self._kld(group, t) is not None)
        if candidates:
            return candidates
        reasons = (
            "; ".join(self.restrictions.reasons(group)) or f"none of {', '.join(map(str, permitted))} was measured"
        )
        raise RecipeError(f"{group.name} can have no type: {reasons}", "QK-E213")

    def _kld(self, group: Group, t: TensorType) -> float | None:
        """Return the divergence of a group in a type: 0 if its tensors have it already, None if unknown."""
        if all(self.source.tensors[name].type is t for name in group.tensors):
            return 0.0
        return self.predictor.kld(group.name, t)

    def _all_types(self, candidate_types: Mapping[str, Sequence[TensorType]]) -> tuple[TensorType, ...]:
        return tuple(dict.fromkeys(t for types in candidate_types.values() for t in types))

    @property
    def _tied_classes(self) -> tuple[str, ...]:
        return self.options.same + (("up,gate",) if self.options.merge_up_gate else ())

    # --- bytes ---

    def _plan_tensors(self, t: TensorType | None, groups: Iterable[Group]) -> list[PlannedTensor]:
        """Return the tensors of a file in which ``groups`` have the type ``t`` and the others that of the source."""
        names = [re.escape(name) for group in groups for name in group.tensors]
        rules = () if t is None else (Rule(rf"^(?:{'|'.join(names)})$", t, "search"),)
        return list(self.baseline_plan(rules).tensors)

    def baseline_plan(self, rules: Sequence[Rule] = ()) -> Plan:
        """Return a plan that copies all tensors not named by ``rules``, with feedback only if types need it."""
        options, path = self.quantize_options("COPY", rules), Path("search.gguf")
        try:
            return plan_from(self.source, path, "COPY", replace(options, feedback=None))
        except RecipeError:
            if options.feedback is None:
                raise
            return plan_from(self.source, path, "COPY", options)

    def _tensors_by_group(self, t: TensorType, groups: Sequence[Group]) -> dict[str, list[PlannedTensor]]:
        """Return the planned tensors of groups in the type ``t``; one merged of two groups belongs to the first."""
        tensors: dict[str, list[PlannedTensor]] = {group.name: [] for group in self.groups}
        for tensor in self._plan_tensors(t, groups):
            owners = self._owners(tensor)
            if owners:
                tensors[owners[0]].append(tensor)
            if len(owners) == 2:
                self._merged_pairs.append((owners[0], owners[1]))
        return tensors

    def plan(self, type_name: str, rules: Sequence[Rule], output: Path | None = None) -> Plan:
        """Return the plan of a file with TYPE and rules."""
        options = self.quantize_options(type_name, rules)
        return plan_from(self.source, output or Path("search.gguf"), type_name, options)

    def quantize_options(self, type_name: str, rules: Sequence[Rule] = ()) -> QuantizeOptions:
        """Return the options of quantize for a file whose TYPE is ``type_name``."""
        options = self.options
        is_ik_preset = preset_by_name(type_name).trees == "ik"
        return QuantizeOptions(
            ready_rules=tuple(rules),
            rules="ik" if self.tree == "ik" and not is_ik_preset else None,
            imatrix=options.imatrix,
            feedback=options.feedback,
            merge_up_gate=options.merge_up_gate,
            allow_requantize=options.allow_requantize,
        )

    def _owners(self, tensor: PlannedTensor) -> list[str]:
        """Return the groups of a planned tensor: two if it merges up and gate experts of different groups.

        A scale that the source lacks belongs to the group of its weight.
        """
        name = tensor.name
        if name.endswith(".scale") and name not in self.source.tensors:
            name = f"{name.removesuffix('.scale')}.weight"
        names = [name] if name in self._group_of else half_names(name) or ()
        return list(dict.fromkeys(self._group_of[name] for name in names if name in self._group_of))

    @cached_property
    def _group_of(self) -> dict[str, str]:
        return {name: group.name for group in self.groups for name in group.tensors}

    def _fixed_footprint(self, tensors: Iterable[PlannedTensor]) -> Footprint:
        """Return the footprint of the tensors of no group; set ``fixed_tensors``, and ``pinned_types`` for those that
        need a rule to keep their type."""
        ungrouped = [t for t in tensors if not self._owners(t)]
        self.fixed_tensors = tuple(ungrouped)
        self.pinned_types = {
            t.name: t.type for t in ungrouped if len(t.shape) > 1 and t.name in self._encodable and is_target(t.type)
        }
        pinned = [t for t in ungrouped if t.name in self.pinned_types]
        if pinned:
            names = f"{pinned[0].name} and {len(pinned) - 1} more" if len(pinned) > 1 else pinned[0].name
            self.notes.append(f"{names}: not measured, keep the type of the source")
        return sum(map(self.footprint, ungrouped), Footprint())

    @cached_property
    def _encodable(self) -> frozenset[str]:
        # each allocation copies tensors that already have its type
        plans = (self.plan(name, ()) for name in ("Q8_0", "Q4_0"))
        return frozenset(t.name for plan in plans for t in plan.tensors if t.encoder)

    def read_bytes(self, tensor: PlannedTensor) -> int:
        """Return the bytes of a tensor that a token reads."""
        share = self._read_share(tensor)
        return -(-tensor.nbytes * share.numerator // share.denominator)

    def footprint(self, tensor: PlannedTensor) -> Footprint:
        read = self.read_bytes(tensor)
        speeds = self.options.speeds
        seconds = read / 1e9 / speeds.get(tensor.type.name, min(speeds.values())) if speeds else 0.0
        return Footprint(round_up(tensor.nbytes, self._alignment), tensor.nbytes, read, seconds)

    @cached_property
    def _alignment(self) -> int:
        return int(self.source.get("general.alignment", 32))

    def _read_share(self, tensor: PlannedTensor) -> Fraction:
        """Return the share of a tensor that a token reads: of experts those used, of embeddings one row."""
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

    # --- choice groups ---

    def _choice_group(
        self,
        groups: Sequence[Group],
        candidate_types: Mapping[str, Sequence[TensorType]],
        tensors_by_type: Mapping[TensorType, Mapping[str, list[PlannedTensor]]],
    ) -> ChoiceGroup:
        common = [t for t in candidate_types[groups[0].name] if all(t in candidate_types[g.name] for g in groups)]
        if not common:
            candidates_text = "; ".join(f"{g.name}: {', '.join(map(str, candidate_types[g.name]))}" for g in groups)
            raise RecipeError(f"these must have the same type, but have none in common: {candidates_text}", "QK-E213")
        choices = []
        for t in common:
            tensors = [p for group in groups for p in tensors_by_type[t][group.name]]
            types = {name: p.type for p in tensors for name in (half_names(p.name) or (p.name,))}
            types = {name: types[name] for group in groups for name in group.tensors if name in types} or types
            unchanged = all(p.type is part.source.type for p in tensors for part in p.parts)
            klds = [0.0 if unchanged else self._kld(group, t) or 0.0 for group in groups]
            error = math.fsum(map(self.combination.additive_part, klds))
            flips = [k * self.predictor.flips(g.name, t) for k, g in zip(klds, groups, strict=True)]
            squares = math.fsum(value**2 for value in flips)
            footprint = sum(map(self.footprint, tensors), Footprint())
            kld = math.fsum(klds)
            choices.append(Choice(t, kld, error, footprint, types, math.fsum(flips), squares, tuple(tensors)))
        return ChoiceGroup(tuple(groups), tuple(sorted(choices, key=lambda c: (c.footprint.data, c.error))))

    # --- allocations ---

    def rules(self, picks: Sequence[int]) -> tuple[Rule, ...]:
        """Return the rules that give every tensor its type."""
        types: dict[str, TensorType] = dict(self.pinned_types)
        for choice_group, pick in zip(self.choice_groups, picks, strict=True):
            types |= choice_group.choices[pick].types
        other_names = [name for name in self.source.tensors if name not in types]
        return tuple(Rule(pattern, t, "search") for pattern, t in rules_for(types, other_names=other_names))

    def total(self, picks: Sequence[int]) -> Footprint:
        """Return the footprint of all tensors."""
        return sum((u.choices[pick].footprint for u, pick in zip(self.choice_groups, picks, strict=True)), self.fixed)

    def kld(self, picks: Sequence[int]) -> float:
        """Return the predicted divergence, in nats per token."""
        choices = [u.choices[pick] for u, pick in zip(self.choice_groups, picks, strict=True)]
        if self.quadrature:
            return math.fsum(c.kld - c.flips for c in choices) + math.sqrt(math.fsum(c.squares for c in choices))
        return self.combination.total(math.fsum(c.error for c in choices))

    def combined_kld(self, parts: Sequence[tuple[float, float]]) -> float:
        """Return the divergence of groups together; ``parts``: divergence and flips of each alone."""
        if self.quadrature:
            return math.fsum(kld - flips for kld, flips in parts) + math.hypot(*(flips for _, flips in parts))
        return self.combination.total(math.fsum(self.combination.additive_part(kld) for kld, _ in parts))

    def main_type(self, picks: Sequence[int]) -> str:
        """Return the name of the type of most values, for TYPE."""
        values: dict[str, int] = {}
        for choice_group, pick in zip(self.choice_groups, picks, strict=True):
            choice = choice_group.choices[pick]
            for group in choice_group.groups:
                for name, shape in group.tensors.items():
                    t = choice.types.get(name, choice.type)
                    values[t.name] = values.get(t.name, 0) + math.prod(shape)
        return max(values, key=lambda name: (values[name], name))

    def runtime_lines(self, plan: Plan) -> tuple[str, ...]:
        """Return a line per runtime that says whether it loads a file."""
        fields = {field.key: field for field in plan.fields}
        return tuple(f"{r.name} {r}" for r in runtimes(fields, plan.entries))


def _check_model(sensitivity: Sensitivity, source: Source) -> None:
    """Raise RecipeError if the sensitivities are of another model."""
    check_language_model(source)
    path = source.paths[0]
    model_name = str(sensitivity.model.get("name") or sensitivity.model.get("path") or "another model")
    if not sensitivity.groups:
        raise RecipeError(f"the file of sensitivities, of {model_name}, has no groups", "QK-E122")
    names: set[str] = set()
    for group in sensitivity.groups:
        for name, shape in group.tensors.items():
            info = source.tensors.get(name)
            if info is None:
                raise RecipeError(
                    f"{path}: has no {name}; the sensitivities are of {model_name}",
                    "QK-E207",
                )
            if _dims(info.shape) != _dims(shape):
                raise RecipeError(
                    f"{path}: {name} is {list(info.shape)}, but was {list(shape)} when measured; the sensitivities "
                    f"are of {model_name}",
                    "QK-E207",
                )
            if name in names:
                raise RecipeError(f"the file of sensitivities has {name} in two groups", "QK-E122")
            names.add(name)
    fingerprint = sensitivity.model.get("fingerprint")
    if isinstance(fingerprint, str) and fingerprint != source.fingerprint():
        raise RecipeError(f"the weights of {path} differ from those of {model_name}, which was measured", "QK-E207")


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without trailing ones."""
    n = max((i + 1 for i, size in enumerate(shape) if size != 1), default=0)
    return tuple(shape[:n])
