"""The source's tensors as they are taken up: merged or split, pruned, in the order of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from quantkit.errors import RecipeError
from quantkit.pipeline.choose import iteration_order
from quantkit.pipeline.experts import merge_layer, split_layer
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.pipeline.plan import Chosen
from quantkit.pipeline.presets import next_dividing
from quantkit.pipeline.regroup import Regrouped, as_it_is, regroup
from quantkit.quantize.draft import Draft
from quantkit.quantize.options import type_of_option


def taken_up(draft: Draft, leave: Mapping[str, str] | None = None) -> Regrouped:
    """Return the source's tensors as they are taken up; ``leave`` names layers not to be merged, and why."""
    source, options = draft.source, draft.options
    if not options.merge_up_gate and not options.split_up_gate:
        return _with_extra_output(draft, as_it_is(source, keep_split=options.keep_split, by_offset=not draft.as_ik))
    verb, decide = ("merge", partial(merge_layer, any_types=True)) if options.merge_up_gate else ("split", split_layer)
    try:
        taken = regroup(source, decide, verb, keep_split=options.keep_split, leave=leave)
    except RecipeError as e:
        raise RecipeError(f"--{verb}-up-gate: {e.message}") from None
    # Without --keep-split those of a merged file's record are not kept, either.
    return _with_extra_output(draft, taken if options.keep_split else replace(taken, shards=None))


def _with_extra_output(draft: Draft, taken: Regrouped) -> Regrouped:
    """Add the tensor of --extra-output-tensor behind the one it is another encoding of, as in ik_llama.cpp."""
    option = draft.options.extra_output_tensor
    if option is None:
        return taken
    wanted, named = type_of_option("extra_output_tensor", option), {t.name: t for t in taken.tensors}
    if EXTRA_OUTPUT in named:
        raise RecipeError(
            f"--extra-output-tensor: the source has an {EXTRA_OUTPUT} already; to change its type, give "
            f"--tensor-type '^output_extra={wanted}'"
        )
    output = named.get("output.weight") or named.get("token_embd.weight")
    if output is None:
        raise RecipeError("--extra-output-tensor: there is neither output.weight nor token_embd.weight to encode again")
    n = output.shape[0]
    found = wanted if n % wanted.block == 0 else next_dividing(wanted, n, ik=True)
    if found.tensor_bytes(output.shape) >= output.nbytes:
        note = f"--extra-output-tensor adds nothing: {found} is no smaller than {output.name}, which is {output.type}"
        draft.notes += [note] if note not in draft.notes else []
        return taken
    at = taken.tensors.index(output) + 1
    tensors = (*taken.tensors[:at], replace(output, name=EXTRA_OUTPUT), *taken.tensors[at:])
    shards = taken.shards and (*taken.shards[:at], taken.shards[at - 1], *taken.shards[at:])
    return replace(taken, tensors=tensors, shards=shards)


def in_order(draft: Draft) -> list[Chosen]:
    """Return the output's tensors in their order, that of the tree's llama-quantize, under the names they will have."""
    kept = [replace(t, name=draft.renamed[t.name]) for t in draft.taken.tensors if t.name in draft.renamed]
    if draft.taken.shards is not None or draft.as_ik:
        return kept
    place = {name: i for i, name in enumerate(iteration_order(t.name for t in kept))}
    return sorted(kept, key=lambda t: place[t.name])


def shards_of(draft: Draft) -> list[int] | None:
    taken = draft.taken
    if taken.shards is None:
        return None
    return [no for t, no in zip(taken.tensors, taken.shards, strict=True) if t.name in draft.renamed]
