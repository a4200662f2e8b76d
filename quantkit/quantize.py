"""Quantize a GGUF model: ``quantkit quantize``, a drop-in for llama-quantize.

plan_quantize(...)  ->  Plan    every type, offset and byte count, nothing written
quantize(...)       ->  QuantizeResult    the plan carried out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

from quantkit.calibration.heldout import held_out_used
from quantkit.cpus import available_cpus
from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.formats.experts import MERGED
from quantkit.formats.gguf import Field, open_model
from quantkit.formats.imatrix import Imatrix, read_imatrix
from quantkit.formats.outputs import end_of_links
from quantkit.formats.remote import located
from quantkit.kernels.formats import SYMMETRIC, check_encoder, encoder_for, has_encoder
from quantkit.pipeline.choose import (
    CLASS_OPTIONS,
    OWN_OPTIONS,
    TORN,
    Choice,
    ModelFacts,
    Request,
    choose_types,
    iteration_order,
    lint_request,
)
from quantkit.pipeline.experts import merge_layer, split_layer
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.pipeline.feedback import Feedback, Recorded
from quantkit.pipeline.importance import Found, Importance, check_importance
from quantkit.pipeline.like import LIKE, Like, read_like
from quantkit.pipeline.metadata import (
    Metadata,
    imatrix_fields,
    parse_override,
    prune_metadata,
    prune_names,
    set_calibration,
    set_feedback,
    set_provenance,
    set_quantization,
)
from quantkit.pipeline.plan import Chosen, Plan, plan_output
from quantkit.pipeline.presets import (
    FTYPE_UNKNOWN,
    PRESET_ALIASES,
    RULES,
    Preset,
    is_target,
    next_dividing,
    preset_by_name,
    repacked_ftype,
    rules_of,
)
from quantkit.pipeline.recipe import Rule, parse_custom_q, parse_tensor_type, read_recipe, read_tensor_type_file
from quantkit.pipeline.regroup import Regrouped, as_it_is, prune_record, regroup
from quantkit.pipeline.repack import Repack, bf16_r16_notes
from quantkit.pipeline.requantize import requantize_notes
from quantkit.pipeline.run import DEFAULT_MAX_RAM, Executor, RunOptions, RunResult, run_plan
from quantkit.pipeline.source import Source
from quantkit.pipeline.threads import Threads
from quantkit.pipeline.work import fed, whole
from quantkit.types import TensorType, type_by_name
from quantkit.units import parse_size
from quantkit.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Everything about a quantization but the two files and TYPE; names as on the command line.

    Types are names from `quantkit types`, in any case. ``rules`` is whose mixture and other rules apply, and whose
    order of tensors and keys, "mainline" or "ik"; None for the tree of TYPE. ``encoder`` is whose search encodes what
    two have: see ``formats.encoder_for``. ``ready_rules`` are a user's rules, before all other sources of them.
    ``like`` is a file whose types tensors get instead of those of TYPE, which is then "LIKE".
    """

    rules: str | None = None

    imatrix: Path | None = None
    include_weights: tuple[str, ...] = ()
    exclude_weights: tuple[str, ...] = ()
    ignore_imatrix_rules: bool = False
    hide_imatrix: bool = False
    feedback: Path | None = None
    calibrate: tuple[Path, ...] = ()
    calibrate_ctx: int = 512
    calibrate_chunks: int | None = None
    balance: bool = False
    like: Path | None = None
    ready_rules: tuple[Rule, ...] = ()
    recipe: tuple[Path, ...] = ()
    tensor_type: tuple[str, ...] = ()
    tensor_type_file: tuple[Path, ...] = ()
    custom_q: tuple[str, ...] = ()
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    per_layer_token_embedding_type: str | None = None
    extra_output_tensor: str | None = None
    ffn_gate_inp_type: str | None = None
    attn_q_type: str | None = None
    attn_k_type: str | None = None
    attn_v_type: str | None = None
    attn_qkv_type: str | None = None
    attn_output_type: str | None = None
    ffn_gate_type: str | None = None
    ffn_up_type: str | None = None
    ffn_down_type: str | None = None
    pure: bool = False
    leave_output_tensor: bool = False
    allow_requantize: bool = False
    fallback: str = "next"
    encoder: str | None = None
    symmetric_q40: bool = False
    merge_up_gate: bool = False
    split_up_gate: bool = False
    prune_layers: tuple[int, ...] = ()
    repack: bool = False
    unrepack: bool = False
    repack_pattern: tuple[str, ...] = ()
    override_kv: tuple[str, ...] = ()
    keep_split: bool = False
    split_max_size: str | int | None = None
    no_provenance: bool = False


@dataclass(frozen=True)
class QuantizeResult:
    """What was written: the plan it followed, and how the run went."""

    plan: Plan
    run: RunResult
    threads: int

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.plan.shards)


@dataclass
class _Draft:
    """A plan in the making; ``taken`` are the source's tensors as they are taken up, merged where that is asked for."""

    source: Source
    preset: Preset
    options: QuantizeOptions
    taken: Regrouped = field(init=False)
    imatrix: Imatrix | None = None
    importance: Importance | None = None
    like: Like | None = None
    feedback: Feedback | None = None
    executor: Callable[[Threads], Executor] | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def overrides(self) -> dict[str, Field]:
        overrides: dict[str, Field] = {}
        for item in map(parse_override, self.options.override_kv):
            overrides.pop(item.key, None)  # as in a file, a key that is set again moves to the end
            overrides[item.key] = item
        return overrides

    def key(self, key: str) -> Any:
        """Return a metadata key's value or None; overrides count, as when llama-quantize loads the source."""
        return self.overrides[key].value if key in self.overrides else self.source.get(key)

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint()

    @property
    def adds_output(self) -> bool:
        """True if there is a second output that the source does not have."""
        return EXTRA_OUTPUT not in self.source.tensors and any(t.name == EXTRA_OUTPUT for t in self.taken.tensors)

    def original_names(self) -> dict[str, str]:
        """Return whose inputs tensors of the output have: names there, and names in the source."""
        original = {new: old for old, new in self.renamed.items()}
        if self.adds_output:  # which has the inputs of the output
            original[EXTRA_OUTPUT] = next(n for n in ("output.weight", "token_embd.weight") if n in self.renamed)
        return original

    @cached_property
    def as_ik(self) -> bool:
        """True if the file is laid out as ik_llama.cpp does: tensors and keys keep the source's order."""
        options = self.options
        return options.repack or options.unrepack or (options.rules or rules_of(self.preset)) == "ik"


def quantize(
    source: str | Path,
    output: str | Path | None,
    type: str,  # noqa: A002 - the word of the command line
    options: QuantizeOptions | None = None,
    *,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Quantize ``source`` to ``output``.

    Args:
        source: a GGUF file, or any shard of a split model.
        output: the file to write; None for ggml-model-TYPE.gguf beside the source, as llama-quantize.
        type: a preset, its number, or a tensor type, in any case; with ``options.repack`` or ``unrepack`` only a name
            for the output, also "REPACK" or "UNREPACK"; with ``options.like`` "LIKE".
        options: everything else that decides what is written.
        max_ram: bytes (or "2G") that the workers' buffers may take together.
        run: threads, resume, overwrite, measure_error, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; nothing stands under the final name then.
    """
    return run_quantize(plan_quantize(source, output, type, options), max_ram=max_ram, **run)


def run_quantize(plan: Plan, *, max_ram: int | str = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]) -> QuantizeResult:
    """Carry out a plan of ``plan_quantize``; arguments and errors as for ``quantize``."""
    given = run.get("threads") or 0
    threads = given if given > 0 else available_cpus()
    run["threads"] = threads if run.get("ray") is None else given
    result = run_plan(plan, max_ram=size_of(max_ram), **run)
    return QuantizeResult(plan, result, sum(node.cpus for node in result.nodes) or threads)


def plan_quantize(
    source: str | Path,
    output: str | Path | None,
    type: str,  # noqa: A002 - the word of the command line
    options: QuantizeOptions | None = None,
) -> Plan:
    """Decide everything about a quantization and write nothing; arguments and errors as for ``quantize``."""
    options = options or QuantizeOptions()
    check_options(type, options)
    with open_model(source) as opened:
        return plan_from(opened, output_path(source, output, type, options), type, options)


def check_options(type: str, options: QuantizeOptions) -> None:  # noqa: A002
    """Raise what is wrong with the options, before any file is opened."""
    exclusive = (
        *(("keep_split", "split_max_size"), ("merge_up_gate", "split_up_gate"), ("repack", "unrepack")),
        *(("feedback", "calibrate"), ("prune_layers", "calibrate"), ("imatrix", "balance")),
    )
    for pair in exclusive:
        if all(getattr(options, name) not in (None, False, ()) for name in pair):
            first, second = (f"--{name.replace('_', '-')}" for name in pair)
            raise RecipeError(f"{first} and {second} exclude each other: give only one of them")
    if type != LIKE and options.like is not None:
        raise RecipeError(f"--like gives every tensor its type: leave {type} away")
    if type == LIKE and options.like is None:
        raise RecipeError("TYPE LIKE needs the file of --like")
    if options.like is not None and options.pure:
        raise RecipeError("--pure is about the mixture of a preset, and --like takes its place: give one of them")
    if options.balance and not options.calibrate:
        raise RecipeError("--balance needs the inputs of weights, and --calibrate has them: give a text")
    check_encoder(options.encoder)
    _check_repack(options)


def plan_from(
    source: Source,
    output: Path,
    type: str,  # noqa: A002
    options: QuantizeOptions,
    *,
    reads: Sequence[Path] = (),
    identity: str = "",
) -> Plan:
    """Plan the quantization of a source that is open, with options that are checked.

    ``reads`` are its files, where it does not name them, ``identity`` what else decides its bytes.
    """
    repack = options.repack or options.unrepack
    if repack and type not in ("REPACK", "UNREPACK"):
        _preset(type, options)  # a typing error, which would only be the name of the output
    like = None if options.like is None else read_like(options.like)
    draft = _Draft(source, like.preset if like else _preset("COPY" if repack else type, options), options, like=like)
    _check_source(draft)
    if like is not None:
        like.check(str(draft.key("general.architecture")))
    draft.feedback, draft.executor, draft.source = _feedback(source, options)
    source = draft.source
    draft.taken = _taken(draft)
    _load_importance(draft)
    draft.like = None if like is None else like.pruned(draft.renamed)
    request = _request(draft)
    tensors, choices = _choose(draft, request)
    _lint(draft, request, tensors, choices)
    if draft.like is not None:
        draft.notes += draft.like.notes([tensor.name for tensor in tensors])
    chosen = _with_feedback(draft, _with_importance(draft, request, tensors, choices))
    draft.notes += requantize_notes(source, chosen)
    changed = [(part.source.type, c.type) for c in chosen for part in c.parts]
    draft.notes += request.repack.notes(changed, [c.reason for c in chosen]) if request.repack else []
    draft.notes += bf16_r16_notes(changed)
    if options.encoder is not None and not any(_other_encoder(c.type, c.encoder) for c in chosen):
        draft.notes.append(f"--encoder {options.encoder} changes nothing: types are encoded like that without it")
    if options.symmetric_q40 and not any(c.encoder == SYMMETRIC for c in chosen):
        draft.notes.append("--symmetric-q40 changes nothing: no tensor is encoded as Q4_0")
    given = (options.imatrix, options.feedback, options.like, *options.calibrate)
    files = (*options.recipe, *options.tensor_type_file, *given, *reads)
    seen = draft.feedback.known.identity if draft.feedback else ""
    plan = plan_output(
        source,
        output,
        _metadata(draft, request).fields(),
        chosen,
        title="REPACK" if options.repack else "UNREPACK" if options.unrepack else draft.preset.name,
        rules="" if request.repack else "ik" if request.ik else "mainline",
        notes=draft.notes,
        shard_of=_shards(draft),
        split_max_size=None if options.split_max_size is None else size_of(options.split_max_size),
        reads=[located(p) for p in files if p is not None],
        identity=f"{__version__} {draft.fingerprint} {draft.imatrix.sha256 if draft.imatrix else None}{seen}{identity}",
    )
    if draft.feedback is None:
        return plan
    plan = replace(plan, without_feedback=tuple(draft.feedback.without.items()))
    return plan if draft.executor is None else replace(plan, executor=draft.executor)


def _preset(type: str, options: QuantizeOptions) -> Preset:  # noqa: A002
    if options.rules not in (None, *RULES):
        raise RecipeError(f"--rules {options.rules}: there are rules of {' and '.join(RULES)}")
    return preset_by_name(type, options.rules)


#: Options that say nothing about types, and may be given with --repack and --unrepack.
_WITH_REPACK = {"repack", "unrepack", "repack_pattern", "merge_up_gate", "split_up_gate", "prune_layers", "override_kv"}
_WITH_REPACK |= {"keep_split", "split_max_size", "no_provenance", "allow_requantize"}


def _check_repack(options: QuantizeOptions) -> None:
    """Refuse options about types beside --repack and --unrepack, and a pattern without them."""
    verb = "--repack" if options.repack else "--unrepack"
    if not (options.repack or options.unrepack):
        if options.repack_pattern:
            raise RecipeError("--repack-pattern chooses tensors for --repack or --unrepack: give one of them")
        return
    default = QuantizeOptions()
    for f in fields(options):
        if f.name not in _WITH_REPACK and getattr(options, f.name) != getattr(default, f.name):
            raise RecipeError(
                f"{verb} changes no value, so --{f.name.replace('_', '-')} has no meaning beside it: "
                "leave it away, or quantize to interleaved types"
            )


def size_of(value: int | str) -> int:
    if isinstance(value, int):
        return value
    try:
        return parse_size(value)
    except ValueError as e:
        raise RecipeError(str(e)) from None


def _check_source(draft: _Draft) -> None:
    """Refuse files that are no models: without an architecture nothing can be decided about them or load them."""
    arch = draft.key("general.architecture")
    if isinstance(arch, str) and arch:
        return
    what = "an imatrix, not a model" if draft.source.get("general.type") == "imatrix" else "not a model"
    raise FormatError(
        f"{draft.source.paths[0]}: this is {what}: it has no general.architecture; if it is a model after all, give "
        "--override-kv general.architecture=str:NAME"
    )


def _load_importance(draft: _Draft) -> None:
    options = draft.options
    # Under both names, because layers may turn out to be left as they are.
    names = dict.fromkeys([*draft.source.tensors, *(tensor.name for tensor in draft.taken.tensors)])
    draft.renamed = prune_names(names, options.prune_layers)
    if options.imatrix is None:
        if options.include_weights or options.exclude_weights:
            raise RecipeError(
                "--include-weights and --exclude-weights choose entries of an --imatrix, but none was given"
            )
        return
    draft.imatrix = read_imatrix(options.imatrix)
    warning = held_out_used(draft.imatrix.path, draft.imatrix.extra)
    draft.notes += [] if warning is None else [warning]
    draft.importance = Importance(
        draft.imatrix,
        include=options.include_weights,
        exclude=options.exclude_weights,
        original_names=draft.original_names(),
    )


def _taken(draft: _Draft, leave: Mapping[str, str] | None = None) -> Regrouped:
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


def _with_extra_output(draft: _Draft, taken: Regrouped) -> Regrouped:
    """Add the tensor of --extra-output-tensor behind the one it is another encoding of, as in ik_llama.cpp."""
    option = draft.options.extra_output_tensor
    if option is None:
        return taken
    wanted, named = _type_of_option("extra_output_tensor", option), {t.name: t for t in taken.tensors}
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


def _tensors(draft: _Draft) -> list[Chosen]:
    """Return the output's tensors in their order, that of the tree's llama-quantize, under the names they will have."""
    kept = [replace(t, name=draft.renamed[t.name]) for t in draft.taken.tensors if t.name in draft.renamed]
    if draft.taken.shards is not None or draft.as_ik:
        return kept
    place = {name: i for i, name in enumerate(iteration_order(t.name for t in kept))}
    return sorted(kept, key=lambda t: place[t.name])


def _shards(draft: _Draft) -> list[int] | None:
    taken = draft.taken
    if taken.shards is None:
        return None
    return [no for t, no in zip(taken.tensors, taken.shards, strict=True) if t.name in draft.renamed]


def _choose(draft: _Draft, request: Request) -> tuple[list[Chosen], list[Choice]]:
    """Choose the types; layers whose halves differ and keep their types cannot be merged, and are left alone."""
    left: dict[str, str] = {}
    while True:
        tensors = _tensors(draft)
        mixed = {t.name: types for t in tensors if len(types := _types(t)) > 1}
        facts = ModelFacts.from_metadata(draft.key, tensors, ik=request.ik)
        choices = choose_types(facts, tensors, request, mixed)
        undecided = {t.parts[0].source.name for t, c in zip(tensors, choices, strict=True) if c.undecided}
        if not undecided:
            return tensors, choices
        for layer in draft.taken.changed:
            if undecided.intersection(layer.tensors):
                gate, up = (part.source.type for part in layer.made[0].parts)
                left[layer.prefix] = (
                    f"gate is {gate}, up is {up}, and {draft.preset} keeps both; a rule for {MERGED} can change that"
                )
        draft.taken = _taken(draft, left)


def _types(tensor: Chosen) -> tuple[TensorType, ...]:
    """Return the types of what a tensor is made of, each once."""
    return tuple(dict.fromkeys(part.source.type for part in tensor.parts))


def _lint(draft: _Draft, request: Request, tensors: Sequence[Chosen], choices: Sequence[Choice]) -> None:
    """Note what was regrouped and what looks wrong; refuse to merge what the user gives two types."""
    verb = "merge" if draft.options.merge_up_gate else "split"
    draft.notes += draft.taken.report(verb)
    for lint in lint_request(request, tensors, choices):
        if draft.options.merge_up_gate and lint.code in TORN:
            raise RecipeError(f"--merge-up-gate: {lint.message}, or omit --merge-up-gate")
        draft.notes.append(str(lint))


def _request(draft: _Draft) -> Request:
    options = draft.options
    types = {
        name: _type_of_option(name, value)
        for name in (*OWN_OPTIONS, *CLASS_OPTIONS)
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
        **types,
    )


def _type_of_option(option: str, value: str) -> TensorType:
    name = f"--{option.replace('_', '-')}"
    try:
        found = type_by_name(value)
    except TypeNotSupported as e:
        raise TypeNotSupported(f"{name}: {e.message}") from None
    if not is_target(found):
        raise TypeNotSupported(f"{name}: {found} is not a type for weights; `quantkit types` lists those that are")
    return found


def _rules(options: QuantizeOptions) -> list[Rule]:
    """Collect the rules of all sources: given ones first, then recipes, --tensor-type, its files, --custom-q."""
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


def _with_importance(
    draft: _Draft, request: Request, tensors: Sequence[Chosen], choices: Sequence[Choice]
) -> list[Chosen]:
    """Look up the importance of every tensor that is encoded, and refuse those that may not go without."""
    chosen, finds = [], []
    original = draft.original_names()
    for tensor, choice in zip(tensors, choices, strict=True):
        found = None
        made = not choice.copied and not choice.repacked
        if draft.importance is not None and choice.type.is_quantized and made:
            found = draft.importance.lookup(tensor.name, tensor.shape)
            finds.append(found)
        shown = draft.feedback is not None and draft.feedback.shows(original.get(tensor.name, tensor.name))
        if made and has_encoder(choice.type) and not shown:  # a run refuses types without an encoder as such
            check_importance(
                found,
                tensor.name,
                choice.type,
                preset=draft.preset.name,
                ik=request.ik,
                ignore_rules=draft.options.ignore_imatrix_rules,
            )
        used = found if found is not None and found.entry is not None else None
        chosen.append(_decided(tensor, choice, used, draft.options))
    if draft.importance is not None and finds:
        coverage = draft.importance.coverage([t.name for t in draft.taken.tensors], finds)
        coverage.check()
        draft.notes += coverage.lines()
    return chosen


def _with_feedback(draft: _Draft, chosen: Sequence[Chosen]) -> list[Chosen]:
    """Look up the covariance of every tensor that is encoded, if there are any."""
    if draft.feedback is None:
        return list(chosen)
    original = draft.original_names()
    made = []
    for c in chosen:
        inputs = None
        name = original.get(c.name, c.name)
        if c.encoder:
            inputs = draft.feedback.lookup(c.name, name, c.shape, c.type)
        elif c.is_whole and c.parts[0].source.type is c.type:
            inputs = draft.feedback.corrected(c.name, name, c.shape, c.type)
        made.append(replace(c, parts=tuple(part if inputs is None else fed(part, inputs) for part in c.parts)))
    draft.notes += draft.feedback.notes()
    return made


def _feedback(
    source: Source, options: QuantizeOptions
) -> tuple[Feedback | None, Callable[[Threads], Executor] | None, Source]:
    """Return what says which inputs tensors have, by a file of covariances or by running a text; what runs it; and
    the source as it is to be read."""
    if not options.calibrate:
        return None if options.feedback is None else Feedback(Recorded(options.feedback)), None, source
    from quantkit.sequential import Calibration, Foreseen

    text = Calibration(options.calibrate, options.calibrate_ctx, options.calibrate_chunks, options.balance)
    known = Foreseen(source.paths[0], text)
    return Feedback(known), known.executor, known.source(source)


_WHOSE = {
    "ik": "; encoded as in ik_llama.cpp",
    "mainline": "; encoded as in llama.cpp",
    SYMMETRIC: "; levels -7 .. 7",
}


def _other_encoder(t: TensorType, whose: str) -> bool:
    """Tell whether a tensor is encoded by another search than is usual for its type."""
    return whose not in ("", encoder_for(t))


def _decided(tensor: Chosen, choice: Choice, found: Found | None, options: QuantizeOptions) -> Chosen:
    """Return a tensor with its type, its reason, its encoder and the importance of each of its parts."""
    parts = tuple(whole(p.source, found) if p.is_whole else replace(p, found=found) for p in tensor.parts)
    reason = choice.reason if tensor.is_whole else f"{tensor.reason}; {choice.reason}"
    whose = "" if choice.copied or choice.repacked else _encoder(choice.type, options)
    if _other_encoder(choice.type, whose):
        reason += _WHOSE[whose]
    return replace(
        tensor, type=choice.type, reason=reason, parts=parts, fallback_from=choice.fallback_from, encoder=whose
    )


def _encoder(t: TensorType, options: QuantizeOptions) -> str:
    """Return which encoder of a type is asked for."""
    if options.symmetric_q40 and t.name == "Q4_0":  # in ik_llama.cpp, interleaved types do not heed it
        return SYMMETRIC
    return encoder_for(t, options.encoder)


def _metadata(draft: _Draft, request: Request) -> Metadata:
    """Edit the source's metadata in llama-quantize's order of events."""
    source, options = draft.source, draft.options
    metadata = Metadata(draft.taken.metadata.fields(), ik=draft.as_ik)
    ftype = _copied_ftype(draft) if request.copy else draft.preset.ftype
    more: list[Field] = []
    if draft.imatrix is not None and draft.importance is not None and (n := draft.importance.n_entries):
        more = imatrix_fields(draft.imatrix, str(draft.imatrix.path), n, hide=options.hide_imatrix, ik=draft.as_ik)
    set_quantization(metadata, ftype, draft.overrides.values(), more)
    if options.prune_layers:
        draft.notes += prune_metadata(metadata, str(source.get("general.architecture")), options.prune_layers)
        prune_record(metadata, options.prune_layers)
    if not options.no_provenance:
        set_calibration(metadata, None if options.hide_imatrix else draft.imatrix)
        set_provenance(metadata, _provenance(draft, request))
        set_feedback(metadata, () if draft.feedback is None else draft.feedback.fields())
    return metadata


def _copied_ftype(draft: _Draft) -> int:
    """Return the file type of a copy; that of ik's interleaved preset, or from it, if rows are repacked."""
    ftype = _source_ftype(draft)
    if draft.options.repack or draft.options.unrepack:
        return repacked_ftype(ftype, draft.options.repack)
    return ftype


def _source_ftype(draft: _Draft) -> int:
    """Return the file type of a source; of one that does not say, llama.cpp's guess: the type of most tensors."""
    source, tensors = draft.source, {tensor.name: tensor for tensor in draft.taken.tensors}
    if draft.adds_output:
        del tensors[EXTRA_OUTPUT]
    said = source.get("general.file_type")
    if said is not None:
        if not isinstance(said, int):
            raise FormatError(
                f"{source.paths[0]}: general.file_type is {said!r}, not a number; correct it, or do not COPY"
            )
        return said
    types = Counter(tensors[name].type.name for name in (tensors if draft.as_ik else iteration_order(tensors)))
    ftype = 0
    with suppress(TypeNotSupported):
        ftype = preset_by_name(max(types, key=lambda name: types[name], default="F32")).ftype
    return ftype | FTYPE_UNKNOWN


def _provenance(draft: _Draft, request: Request) -> dict[str, str]:
    """Return what a reader of the file should know about its making."""
    options = draft.options
    apart = (
        "imatrix",
        "feedback",
        "like",
        "ready_rules",
        "recipe",
        "tensor_type",
        "tensor_type_file",
        "custom_q",
        "no_provenance",
    )
    default = QuantizeOptions()
    given = [
        f"--{f.name.replace('_', '-')} {_shown(getattr(options, f.name))}".strip()
        for f in fields(QuantizeOptions)
        if f.name not in apart and getattr(options, f.name) != getattr(default, f.name)
    ]
    first = draft.preset.name if options.like is None else f"--like {options.like.name}"
    lines = [first, *given, *(f"{rule.pattern} = {rule.type}" for rule in request.rules)]
    facts = {
        "version": __version__,
        "recipe": "\n".join(lines),
        "source.name": draft.source.paths[0].name,
        "source.fingerprint": draft.fingerprint,
    }
    if draft.imatrix is not None and not options.hide_imatrix:
        facts["imatrix.sha256"] = draft.imatrix.sha256
    return facts


def _shown(value: object) -> str:
    if value is True:
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def title_of(type_text: str, options: QuantizeOptions) -> str:
    """Return the name of what TYPE stands for; of a file's types, that of its general.file_type."""
    found = preset_by_name(type_text, options.rules) if options.like is None else read_like(options.like).preset
    return found.name


def output_path(source: str | Path, output: str | Path | None, type_text: str, options: QuantizeOptions) -> Path:
    """Return the output's path; without one, ggml-model-TYPE.gguf beside the source, with the name of a number."""
    if output is not None:
        return end_of_links(output)
    if options.like is not None:
        return located(source).with_name(f"ggml-model-{title_of(type_text, options)}.gguf")
    name = type_text.strip().upper()
    if name.isdecimal():
        name = preset_by_name(name, options.rules).name
        name = next((alias for alias, of in PRESET_ALIASES.items() if of == name), name)  # as in llama-quantize
    return located(source).with_name(f"ggml-model-{name}.gguf")
