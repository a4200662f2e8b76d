"""The type of every tensor, by options, rules and the preset."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import RecipeError
from quantkit.formats.experts import MERGED
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline.choose import (
    CLASS_OPTIONS,
    MERGE_LINTS,
    TENSOR_OPTIONS,
    Choice,
    ModelFacts,
    Request,
    choose_types,
    lint_request,
)
from quantkit.pipeline.lora_source import LoraSource
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.recipe import Rule, parse_custom_q, parse_tensor_type, read_recipe, read_tensor_type_file
from quantkit.pipeline.repack import Repack
from quantkit.quantize.draft import Draft, ordered_tensors, with_groups
from quantkit.quantize.options import type_of_option
from quantkit.types import TensorType


def request_of(draft: Draft) -> Request:
    options = draft.options
    types = {
        name: type_of_option(name, value)
        for name in (*TENSOR_OPTIONS, *CLASS_OPTIONS)
        if (value := getattr(options, name)) is not None and (name != "extra_output_tensor" or draft.adds_output)
    }
    return Request(
        draft.preset,
        tree=options.rules,
        rules=tuple(_rules(options)),
        pure=options.pure,
        leave_output_tensor=options.leave_output_tensor,
        allow_requantize=options.allow_requantize,
        has_imatrix=bool(options.calibrate) or draft.importance is not None and draft.importance.n_entries > 0,
        fallback=options.fallback,
        repack=Repack(options.repack, options.repack_pattern) if options.repack or options.unrepack else None,
        like=draft.like,
        own_types=draft.source.own_types() if isinstance(draft.source, LoraSource) else {},
        **types,
    )


def _rules(options: QuantizeOptions) -> list[Rule]:
    """Collect the rules of all sources: arguments first, then recipes, --tensor-type, its files, --custom-q."""
    rules = list(options.ready_rules)
    for path in options.recipe:
        rules += read_recipe(path)
    for number, text in enumerate(options.tensor_type, 1):
        rules += parse_tensor_type(text, number)
    for path in options.tensor_type_file:
        rules += read_tensor_type_file(path)
    for number, text in enumerate(options.custom_q, 1):
        rules += parse_custom_q(text, number)
    return rules


def choose(draft: Draft, request: Request) -> tuple[Draft, list[OutputTensor], list[Choice]]:
    """Choose the types; layers whose up and gate keep different types remain unmerged in the returned draft."""
    unmerged: dict[str, str] = {}
    while True:
        tensors = ordered_tensors(draft)
        mixed = {t.name: types for t in tensors if len(types := _types(t)) > 1}
        facts = ModelFacts.from_metadata(draft.key, tensors, ik=request.ik)
        choices = choose_types(facts, tensors, request, mixed)
        undecided = {t.parts[0].source.name for t, c in zip(tensors, choices, strict=True) if c.undecided}
        if not undecided:
            return draft, tensors, choices
        for layer in draft.groups.changed:
            if undecided.intersection(layer.tensors):
                gate, up = (part.source.type for part in layer.outputs[0].parts)
                unmerged[layer.prefix] = (
                    f"{draft.preset} leaves gate as {gate} and up as {up}; add a rule for {MERGED} to change that"
                )
        draft = with_groups(draft, unmerged)


def _types(tensor: OutputTensor) -> tuple[TensorType, ...]:
    """Return the distinct types of a tensor's source tensors."""
    return tuple(dict.fromkeys(part.source.type for part in tensor.parts))


def lint(draft: Draft, request: Request, tensors: Sequence[OutputTensor], choices: Sequence[Choice]) -> list[str]:
    """Return notes on regrouped tensors, and lints; refuse to merge tensors that rules give two types."""
    lints = lint_request(request, tensors, choices)
    for lint in lints:
        if draft.options.merge_up_gate and lint.code in MERGE_LINTS:
            raise RecipeError(f"--merge-up-gate: {lint.message}, or omit --merge-up-gate", "QK-E211")
    return [*draft.groups.report("merge" if draft.options.merge_up_gate else "split"), *map(str, lints)]
