"""A plan under construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field
from quantkit.formats.imatrix import Imatrix
from quantkit.options.quantize import QuantizeOptions
from quantkit.pipeline.choose import iteration_order
from quantkit.pipeline.experts import merge_layer, split_layer
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.pipeline.feedback import Feedback
from quantkit.pipeline.importance import Importance
from quantkit.pipeline.metadata import override_file, parse_override
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.presets import Preset, next_dividing, rules_of
from quantkit.pipeline.reference_types import ReferenceTypes
from quantkit.pipeline.regroup import Regrouped, keep_groups, regroup
from quantkit.pipeline.run import Executor
from quantkit.pipeline.source import Source
from quantkit.pipeline.threads import Threads
from quantkit.quantize.options import type_of_option


@dataclass
class Draft:
    """A plan under construction; ``regrouped``: the source's tensors, merged or split where that is asked for."""

    source: Source
    preset: Preset
    options: QuantizeOptions
    regrouped: Regrouped = field(init=False)
    imatrix: Imatrix | None = None
    importance: Importance | None = None
    like: ReferenceTypes | None = None
    feedback: Feedback | None = None
    executor: Callable[[Threads], Executor] | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def overrides(self) -> dict[str, Field]:
        overrides: dict[str, Field] = {}
        for text in self.options.override_kv:
            item = parse_override(text)
            if (path := override_file(text)) is not None:
                self.notes.append(f"--override-kv {item.key}: the text of {path}, {len(item.value)} characters")
            overrides.pop(item.key, None)  # as in a file, a key that is set again moves to the end
            overrides[item.key] = item
        return overrides

    def key(self, key: str) -> Any:
        """Return a metadata key's value or None; overrides count, as when llama-quantize loads the source."""
        return self.overrides[key].value if key in self.overrides else self.source.get(key)

    @property
    def first_nextn_layer(self) -> int:
        """The first layer of the source that predicts more tokens; beyond all layers if none does."""
        arch = self.key("general.architecture")
        layers, n_nextn = self.key(f"{arch}.block_count"), self.key(f"{arch}.nextn_predict_layers")
        return layers - n_nextn if isinstance(layers, int) and isinstance(n_nextn, int) and n_nextn else 1 << 31

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint()

    @property
    def adds_output(self) -> bool:
        """True if there is a second output that the source does not have."""
        return EXTRA_OUTPUT not in self.source.tensors and any(t.name == EXTRA_OUTPUT for t in self.regrouped.tensors)

    def original_names(self) -> dict[str, str]:
        """Return the source names of output tensors, by whose inputs they are quantized."""
        original = {new: old for old, new in self.renamed.items()}
        if self.adds_output:  # which has the inputs of the output
            original[EXTRA_OUTPUT] = next(n for n in ("output.weight", "token_embd.weight") if n in self.renamed)
        return original

    @cached_property
    def as_ik(self) -> bool:
        """True if the file is laid out as ik_llama.cpp does: tensors and keys keep the source's order."""
        options = self.options
        return options.repack or options.unrepack or (options.rules or rules_of(self.preset)) == "ik"


def check_source(draft: Draft) -> None:
    """Refuse files without an architecture: they are no models."""
    arch = draft.key("general.architecture")
    if isinstance(arch, str) and arch:
        return
    subject = "an imatrix, not a model" if draft.source.get("general.type") == "imatrix" else "not a model"
    raise FormatError(
        f"{draft.source.paths[0]}: this is {subject}: it has no general.architecture; if it is a model after all, give "
        "--override-kv general.architecture=str:NAME",
        "QK-E123",
    )


# ---------------------------------------------------------------- the source's tensors


def regroup_tensors(draft: Draft, leave: Mapping[str, str] | None = None) -> Regrouped:
    """Return the source's tensors as they are taken up; ``leave`` names layers not to be merged, and why."""
    source, options = draft.source, draft.options
    if not options.merge_up_gate and not options.split_up_gate:
        return _with_extra_output(draft, keep_groups(source, keep_split=options.keep_split, by_offset=not draft.as_ik))
    verb, decide = ("merge", partial(merge_layer, any_types=True)) if options.merge_up_gate else ("split", split_layer)
    try:
        result = regroup(source, decide, verb, keep_split=options.keep_split, leave=leave)
    except RecipeError as e:
        raise RecipeError(f"--{verb}-up-gate: {e.message}", e.code) from None
    # Without --keep-split those of a merged file's record are not kept, either.
    return _with_extra_output(draft, result if options.keep_split else replace(result, shards=None))


def _with_extra_output(draft: Draft, regrouped: Regrouped) -> Regrouped:
    """Add --extra-output-tensor after the tensor that it encodes again, as in ik_llama.cpp."""
    option = draft.options.extra_output_tensor
    if option is None:
        return regrouped
    target, by_name = type_of_option("extra_output_tensor", option), {t.name: t for t in regrouped.tensors}
    if EXTRA_OUTPUT in by_name:
        raise RecipeError(
            f"--extra-output-tensor: the source has an {EXTRA_OUTPUT} already; to change its type, give "
            f"--tensor-type '^output_extra={target}'",
            "QK-E201",
        )
    output = by_name.get("output.weight") or by_name.get("token_embd.weight")
    if output is None:
        raise RecipeError(
            "--extra-output-tensor: there is neither output.weight nor token_embd.weight to encode again", "QK-E206"
        )
    n = output.shape[0]
    output_type = target if n % target.block == 0 else next_dividing(target, n, ik=True)
    if output_type.tensor_bytes(output.shape) >= output.nbytes:
        size = f"{output_type} is no smaller than {output.name}, which is {output.type}"
        note = f"--extra-output-tensor adds nothing: {size}"
        draft.notes += [note] if note not in draft.notes else []
        return regrouped
    position = regrouped.tensors.index(output) + 1
    tensors = (*regrouped.tensors[:position], replace(output, name=EXTRA_OUTPUT), *regrouped.tensors[position:])
    shards = regrouped.shards and (
        *regrouped.shards[:position],
        regrouped.shards[position - 1],
        *regrouped.shards[position:],
    )
    return replace(regrouped, tensors=tensors, shards=shards)


def ordered_tensors(draft: Draft) -> list[OutputTensor]:
    """Return the output's tensors in the order of the tree's llama-quantize, under their final names."""
    tensors = [replace(t, name=draft.renamed[t.name]) for t in draft.regrouped.tensors if t.name in draft.renamed]
    if draft.regrouped.shards is not None or draft.as_ik:
        return tensors
    place = {name: i for i, name in enumerate(iteration_order(t.name for t in tensors))}
    return sorted(tensors, key=lambda t: place[t.name])


def shards_of(draft: Draft) -> list[int] | None:
    regrouped = draft.regrouped
    if regrouped.shards is None:
        return None
    return [no for t, no in zip(regrouped.tensors, regrouped.shards, strict=True) if t.name in draft.renamed]
