"""A plan under construction: a record to which each step of ``plan_from`` returns a successor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field
from quantkit.formats.imatrix import Imatrix
from quantkit.formats.override import override_file, parse_override
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline.choose import iteration_order
from quantkit.pipeline.experts import merge_layer, split_layer
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.pipeline.feedback import Feedback
from quantkit.pipeline.importance import Importance
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.presets import Preset, next_dividing, rules_of
from quantkit.pipeline.reference_types import ReferenceTypes
from quantkit.pipeline.regroup import RegroupedTensors, keep_groups, regroup
from quantkit.pipeline.run import Executor
from quantkit.pipeline.source import Source
from quantkit.pipeline.threads import Threads
from quantkit.quantize.options import type_of_option


@dataclass(frozen=True)
class Draft:
    """A plan under construction."""

    source: Source
    preset: Preset
    options: QuantizeOptions
    #: Metadata of --override-kv, by key.
    overrides: Mapping[str, Field] = field(default_factory=dict)
    #: The source's tensors, merged or split if requested.
    regrouped: RegroupedTensors | None = None
    imatrix: Imatrix | None = None
    importance: Importance | None = None
    like: ReferenceTypes | None = None
    feedback: Feedback | None = None
    executor: Callable[[Threads], Executor] | None = None
    #: Names of the output's tensors by those of the source's; pruned ones are missing.
    renamed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def with_notes(self, lines: Iterable[str]) -> Draft:
        """Return the draft with more notes, without repetitions."""
        notes = [line for line in lines if line not in self.notes]
        return replace(self, notes=(*self.notes, *notes)) if notes else self

    @property
    def groups(self) -> RegroupedTensors:
        """The source's tensors, regrouped. Raises AssertionError before ``with_groups``."""
        assert self.regrouped is not None
        return self.regrouped

    def key(self, key: str) -> Any:
        """Return a metadata key's value or None; overrides count, as when llama-quantize loads the source."""
        return self.overrides[key].value if key in self.overrides else self.source.get(key)

    @property
    def is_mmproj(self) -> bool:
        """Whether the model is an mmproj file: encoders, without a language model."""
        return bool(self.key("general.architecture") == "clip")

    @property
    def first_nextn_layer(self) -> int:
        """The first prediction layer (MTP) of the source; beyond all layers if it has none."""
        arch = self.key("general.architecture")
        layers, n_nextn = self.key(f"{arch}.block_count"), self.key(f"{arch}.nextn_predict_layers")
        return layers - n_nextn if isinstance(layers, int) and isinstance(n_nextn, int) and n_nextn else 1 << 31

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint()

    @property
    def adds_output(self) -> bool:
        """True if there is a second output that the source does not have."""
        return EXTRA_OUTPUT not in self.source.tensors and any(t.name == EXTRA_OUTPUT for t in self.groups.tensors)

    def original_names(self) -> dict[str, str]:
        """Return the source names of output tensors, by whose inputs they are quantized."""
        original = {new: old for old, new in self.renamed.items()}
        if self.adds_output:  # whose input is that of the output
            original[EXTRA_OUTPUT] = next(n for n in ("output.weight", "token_embd.weight") if n in self.renamed)
        return original

    @cached_property
    def as_ik(self) -> bool:
        """True if the file is laid out as ik_llama.cpp does: tensors and keys keep the source's order."""
        options = self.options
        return options.repack or options.unrepack or (options.rules or rules_of(self.preset)) == "ik"


def start(source: Source, preset: Preset, options: QuantizeOptions, like: ReferenceTypes | None) -> Draft:
    """Return the draft of a source with overridden metadata. Raises FormatError if it is not a model."""
    overrides: dict[str, Field] = {}
    notes: list[str] = []
    for text in options.override_kv:
        item = parse_override(text)
        if (path := override_file(text)) is not None:
            notes.append(f"--override-kv {item.key}: the text of {path}, {len(item.value)} characters")
        overrides.pop(item.key, None)  # a key that is set again moves to the end, as in a file
        overrides[item.key] = item
    draft = Draft(source, preset, options, overrides, like=like, notes=tuple(notes))
    _check_source(draft)
    return draft


def _check_source(draft: Draft) -> None:
    """Refuse files without an architecture, which are not models."""
    arch = draft.key("general.architecture")
    if isinstance(arch, str) and arch:
        return
    subject = "an imatrix, not a model" if draft.source.get("general.type") == "imatrix" else "not a model"
    raise FormatError(
        f"{draft.source.paths[0]}: {subject}: it has no general.architecture; if it is a model, give --override-kv "
        "general.architecture=str:NAME",
        "QK-E123",
    )


# ---------------------------------------------------------------- the source's tensors


def with_groups(draft: Draft, leave: Mapping[str, str] | None = None) -> Draft:
    """Return the draft with the source's tensors as they are encoded; ``leave``: layers not to be merged, and why."""
    regrouped, note = _add_extra_output(draft, _regroup(draft, leave))
    return replace(draft, regrouped=regrouped).with_notes(note)


def _regroup(draft: Draft, leave: Mapping[str, str] | None) -> RegroupedTensors:
    source, options = draft.source, draft.options
    if not options.merge_up_gate and not options.split_up_gate:
        return keep_groups(source, keep_split=options.keep_split, by_offset=not draft.as_ik)
    verb, decide = ("merge", partial(merge_layer, any_types=True)) if options.merge_up_gate else ("split", split_layer)
    try:
        result = regroup(source, decide, verb, keep_split=options.keep_split, leave=leave)
    except RecipeError as e:
        raise RecipeError(f"--{verb}-up-gate: {e.message}", e.code) from None
    # Without --keep-split, the shards recorded in a merged file are also ignored.
    return result if options.keep_split else replace(result, shards=None)


def _add_extra_output(draft: Draft, regrouped: RegroupedTensors) -> tuple[RegroupedTensors, list[str]]:
    """Add --extra-output-tensor after the tensor that it encodes again, as in ik_llama.cpp; also return a note if that
    gains nothing.
    """
    option = draft.options.extra_output_tensor
    if option is None:
        return regrouped, []
    target, by_name = type_of_option("extra_output_tensor", option), {t.name: t for t in regrouped.tensors}
    if EXTRA_OUTPUT in by_name:
        raise RecipeError(
            f"--extra-output-tensor: the source already has {EXTRA_OUTPUT}; to change its type, give --tensor-type "
            f"'^output_extra={target}'",
            "QK-E201",
        )
    output = by_name.get("output.weight") or by_name.get("token_embd.weight")
    if output is None:
        raise RecipeError(
            "--extra-output-tensor: the source has neither output.weight nor token_embd.weight", "QK-E206"
        )
    n = output.shape[0]
    output_type = target if n % target.block == 0 else next_dividing(target, n, ik=True)
    if output_type.tensor_bytes(output.shape) >= output.nbytes:
        size = f"{output_type} is not smaller than {output.name}, which is {output.type}"
        return regrouped, [f"--extra-output-tensor is ignored: {size}"]
    position = regrouped.tensors.index(output) + 1
    tensors = (*regrouped.tensors[:position], replace(output, name=EXTRA_OUTPUT), *regrouped.tensors[position:])
    shards = regrouped.shards and (
        *regrouped.shards[:position],
        regrouped.shards[position - 1],
        *regrouped.shards[position:],
    )
    return replace(regrouped, tensors=tensors, shards=shards), []


def ordered_tensors(draft: Draft) -> list[OutputTensor]:
    """Return the output's tensors in the order of the tree's llama-quantize, under their final names."""
    tensors = [replace(t, name=draft.renamed[t.name]) for t in draft.groups.tensors if t.name in draft.renamed]
    if draft.groups.shards is not None or draft.as_ik:
        return tensors
    place = {name: i for i, name in enumerate(iteration_order(t.name for t in tensors))}
    return sorted(tensors, key=lambda t: place[t.name])


def shards_of(draft: Draft) -> list[int] | None:
    regrouped = draft.groups
    if regrouped.shards is None:
        return None
    return [no for t, no in zip(regrouped.tensors, regrouped.shards, strict=True) if t.name in draft.renamed]
