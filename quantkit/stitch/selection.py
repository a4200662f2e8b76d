"""The file that each tensor is taken from: by patterns of names, or by the types of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantkit.errors import RecipeError
from quantkit.formats.gguf import TensorInfo
from quantkit.names import shorten
from quantkit.patterns import Pattern
from quantkit.pipeline.choose import Choice, ModelFacts, Request, choose_types
from quantkit.pipeline.facts import Metadata
from quantkit.pipeline.presets import preset_by_name
from quantkit.pipeline.recipe import Rule, lint_rules
from quantkit.stitch.parts import Part
from quantkit.types import BY_NAME

#: Endings of the scales that a weight in NVFP4 may have.
_SCALES = ("scale", "input_scale")
#: Tensors that a message lists.
_MAX_NAMES = 5


def select_by_pattern(names: Sequence[str], take: Sequence[tuple[str, Part]]) -> dict[str, Part]:
    """Return the file of each tensor that a pattern takes: of the first that matches and whose file has the tensor.

    Raises RecipeError for a pattern that takes none.
    """
    selection: dict[str, Part] = {}
    for text, part in take:
        pattern = Pattern(text, "--take")
        matches = [name for name in names if name not in selection and pattern.search(name) and name in part.names]
        if not matches:
            raise RecipeError(f"--take {text}: takes no tensor from {part.path}", "QK-E206")
        selection |= dict.fromkeys(matches, part)
    return selection


def select_by_recipe(
    tensors: Sequence[TensorInfo], metadata: Metadata, rules: Sequence[Rule], parts: Sequence[Part]
) -> dict[str, Part]:
    """Return the file of each tensor: the first that has it in the type that ``quantize`` gives it by the rules.

    That is the type of the rule, or the one that replaces it where rows do not fit, by llama.cpp's or ik_llama.cpp's
    rules; a map has a tensor in the type of its name. Tensors that are never quantized, and those that no rule matches,
    are the first file's. Raises RecipeError if no file has a tensor in its type.
    """
    choices = [_choose(tensors, metadata, rules, tree) for tree in ("mainline", "ik")]
    selection: dict[str, Part] = {}
    missing: list[str] = []
    for tensor, *verdicts in zip(tensors, *choices, strict=True):
        part = _find(tensor.name, verdicts, parts)
        if part is not None:
            selection[tensor.name] = part
        else:
            types = dict.fromkeys(p.tensors[tensor.name].type.name for p in parts if tensor.name in p.names)
            missing.append(f"{tensor.name} in {verdicts[0].type} (there is {', '.join(types)})")
    if missing:
        suffix = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
        raise RecipeError(
            f"no file has {', '.join(missing[:_MAX_NAMES])}{suffix}: give a file with these types, or change the "
            "recipe",
            "QK-E217",
        )
    return selection


def with_own_scales(selection: Mapping[str, Part], base: Part) -> dict[str, Part]:
    """Return the file of each tensor, where scales come with their tensor in NVFP4; one of another type has none."""
    result: dict[str, Part] = {}
    for name, part in selection.items():
        stem, _, ending = name.rpartition(".")
        weight = f"{stem}.weight"
        if ending in _SCALES and weight in selection and _has_nvfp4(weight, (selection[weight], base)):
            continue  # it comes with the weight, or not at all
        result[name] = part
        scales = [f"{stem}.{scale}" for scale in _SCALES if ending == "weight"]
        if any(scale in p.names for scale in scales for p in (part, base)) and _has_nvfp4(name, (part, base)):
            result |= {scale: part for scale in scales if scale in part.names}
    return result


def _has_nvfp4(name: str, parts: Sequence[Part]) -> bool:
    return any(part.offers(name, BY_NAME["NVFP4"]) for part in parts)


def lint(names: Sequence[str], rules: Sequence[Rule]) -> list[str]:
    """Return warnings on rules without effect."""
    return [str(warning) for warning in lint_rules(rules, names)]


def _choose(tensors: Sequence[TensorInfo], metadata: Metadata, rules: Sequence[Rule], tree: str) -> list[Choice]:
    request = Request(preset_by_name("COPY"), tree=tree, rules=tuple(rules), allow_requantize=True)
    return choose_types(ModelFacts.from_metadata(metadata, tensors, ik=tree == "ik"), tensors, request)


def _find(name: str, verdicts: Sequence[Choice], parts: Sequence[Part]) -> Part | None:
    rule = verdicts[0].rule
    if rule is None:
        return parts[0]
    types = dict.fromkeys((rule.type, *(choice.type for choice in verdicts)))
    for t in types:
        for part in parts:
            if part.offers(name, t) or (t is rule.type and part.label is t and name in part.names):
                return part
    return parts[0] if all(choice.step == "kept" for choice in verdicts) else None


def check_models(metadata: Metadata, parts: Sequence[Part]) -> None:
    """Raise RecipeError if a file has a model of another architecture than the first, or none of its tensors."""
    get = metadata if callable(metadata) else metadata.get
    expected, names = get("general.architecture"), parts[0].names
    for part in parts:
        architecture = None if part.model is None else part.model.get("general.architecture")
        problem = ""
        if architecture not in (None, expected):
            problem = f"a model of {shorten(repr(architecture), 40)}, and {parts[0].path} is one of "
            problem += shorten(repr(expected), 40)
        elif names.isdisjoint(part.names):
            problem = f"has no tensor of {parts[0].path}"
        if problem:
            raise RecipeError(f"{part.path}: {problem}: give files of the same model", "QK-E207")
