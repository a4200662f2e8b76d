"""The type of every tensor, and the reason for it.

The first of these steps that applies to a tensor decides its type:

    1. kept        integers, vectors, norms, the router and some small tensors stay as they are. Nothing below
                   changes them, except --ffn-gate-inp-type for the router.
    2. own option  --token-embedding-type, --per-layer-token-embedding-type, --output-tensor-type,
                   --extra-output-tensor, --ffn-gate-inp-type. (One exception, as in llama.cpp: a rule for
                   per_layer_token_embd.weight beats --token-embedding-type.)
    3. rules       -r/--recipe, --tensor-type, --tensor-type-file, --custom-q, in the order given; the first match.
    4. class       --attn-{q,k,v,qkv,output}-type, --ffn-{gate,up,down}-type.
    5. preset      COPY keeps the type; --pure, a plain type or a float gives the base type; else the type rules.
                   With --like, the type in that file, which tensors that are kept otherwise have, too.

With --repack or --unrepack, none of these steps applies (repack.py).

Afterwards, in any case, rows that are not a multiple of the block get the fallback (--fallback), and interleaved types
become plain ones in embeddings and where the number of rows is not a multiple of the interleave.

By llama.cpp's rules the result equals llama-quantize b11434's for every tensor, including counters and oddities; they
are from src/llama-quant.cpp (tensor_allows_quantization, llama_tensor_get_type, tensor_type_fallback). By ik's (--rules
ik) it equals that of ik_llama.cpp 8337e4cd3, src/llama-quantize.cpp (the loop of llama_model_quantize_internal,
llama_tensor_get_type, change_type_if_necessary). Class options then apply to the same tensors as in ik, such as
--attn-k-type also to attn_kv_b.

Options that have no effect there (rules and class options with --pure, COPY or a float preset; most class options in
ik's presets of few bits; --attn-qkv-type in ik) do have an effect here. Where a peer would fail, or write rows that
cannot be read (interleaved per_layer_token_embd), the nearest type that works is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantkit.errors import TypeNotSupported
from quantkit.formats.experts import MERGED
from quantkit.formats.gguf.rules import GGML_DIMS, n_dims
from quantkit.kernels.interleave import can_interleave, repacks
from quantkit.pipeline import presets, type_rules_ik
from quantkit.pipeline.facts import (
    EXTRA_OUTPUT,
    ROUTER,
    TOKEN_EMBD_NAMES,
    ModelFacts,
    TensorLike,
    category,
    iteration_order,
    unquantized_reason,
)
from quantkit.pipeline.presets import Preset
from quantkit.pipeline.recipe import Lint, Rule, abbreviate, decide, lint_rules
from quantkit.pipeline.reference_types import ReferenceTypes
from quantkit.pipeline.repack import Repack
from quantkit.pipeline.type_rules import Reason, TypeRules
from quantkit.pipeline.type_rules_ik import IkTypeRules
from quantkit.pipeline.type_rules_llama import LlamaTypeRules
from quantkit.types import TensorType, type_by_name

__all__ = [
    "Choice", "Lint", "ModelFacts", "Request", "Rule", "category", "choose_types", "iteration_order", "lint_request",
    "option_classes",
]  # fmt: skip


# --- the request ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """The user's request: TYPE and the options about types.

    ``tree``: the rules that apply, "mainline" or "ik"; default: the preset's. ``fallback``: "next", "error" or a type.
    """

    preset: Preset
    tree: str | None = None
    rules: tuple[Rule, ...] = ()
    output_tensor_type: TensorType | None = None
    token_embedding_type: TensorType | None = None
    per_layer_token_embedding_type: TensorType | None = None
    extra_output_tensor: TensorType | None = None
    ffn_gate_inp_type: TensorType | None = None
    attn_q_type: TensorType | None = None
    attn_k_type: TensorType | None = None
    attn_v_type: TensorType | None = None
    attn_qkv_type: TensorType | None = None
    attn_output_type: TensorType | None = None
    ffn_gate_type: TensorType | None = None
    ffn_up_type: TensorType | None = None
    ffn_down_type: TensorType | None = None
    pure: bool = False
    leave_output_tensor: bool = False
    allow_requantize: bool = False
    has_imatrix: bool = False
    fallback: str = "next"
    repack: Repack | None = None
    like: ReferenceTypes | None = None
    #: Types of tensors that are kept or copied, by name, where they are not those of the source.
    own_types: Mapping[str, TensorType] = field(default_factory=dict)

    @property
    def copy(self) -> bool:
        """True for COPY: tensors remain unchanged, except those that an option or rule names."""
        return self.preset.base is None

    @property
    def ik(self) -> bool:
        """True if ik_llama.cpp's rules apply."""
        return (self.tree or presets.rules_of(self.preset)) == "ik"

    def type_rules(self, facts: ModelFacts) -> TypeRules | None:
        """Return the preset's type rules; None if every tensor gets the base type, or keeps its own."""
        base = self.preset.base
        if base is None or self.like or self.pure or not self.preset.mixes or not base.is_quantized:
            return None
        kind = IkTypeRules if self.ik else LlamaTypeRules
        return kind(facts, self.preset, base, self.has_imatrix, self.output_tensor_type)


@dataclass(frozen=True, slots=True)
class Choice:
    """The type of one tensor, and the reason for it.

    ``fallback_from`` is the type that the rows or the shape do not allow. ``rule`` is the matching rule, whether it
    decided or not. ``mixed`` are the types of a tensor's parts if they differ; ``source_type`` is then the first.
    """

    name: str
    source_type: TensorType
    type: TensorType
    reason: Reason
    fallback_from: TensorType | None = None
    rule: Rule | None = None
    mixed: tuple[TensorType, ...] = ()

    @property
    def reason_text(self) -> str:
        """The reason in words."""
        return str(self.reason)

    @property
    def step(self) -> str:
        """The deciding step: ``Reason.kind``."""
        return self.reason.kind

    @property
    def copied(self) -> bool:
        """True if the bytes are copied."""
        return self.type == self.source_type and not self.mixed

    @property
    def repacked(self) -> bool:
        """True if values are unchanged, and rows are interleaved or deinterleaved."""
        return not self.copied and all(
            t is self.type or repacks(t, self.type) for t in self.mixed or (self.source_type,)
        )

    @property
    def undecided(self) -> bool:
        """True if parts of different types keep them, so that they cannot become one tensor."""
        return bool(self.mixed) and self.step in ("kept", "COPY", "repack")

    @property
    def requantized(self) -> bool:
        """True if quantized values are encoded again."""
        types = self.mixed or (self.source_type,)
        return not self.undecided and any(
            t.is_quantized and t is not self.type and not repacks(t, self.type) for t in types
        )

    @property
    def source(self) -> str:
        """The type or types of the source, for messages."""
        return " and ".join(map(str, self.mixed or (self.source_type,)))


#: FIELD, in names like blk.0.FIELD.weight, and the class options that apply to it.
_CLASS_OF_FIELD = {
    **{f"attn_{part}": (f"attn_{part}",) for part in ("q", "k", "v", "qkv", "output")},
    **{
        f"ffn_{part}{kind}": (f"ffn_{part}",)
        for part in ("gate", "up", "down")
        for kind in ("", "_exps", "_shexp", "_chexps")
    },
    "ffn_gate_up_exps": ("ffn_gate", "ffn_up"),
}
_FIELD = re.compile(r"(?:^|\.)(\w+)(?:\.\d+)?\.weight$")
TENSOR_OPTIONS = (
    "output_tensor_type", "token_embedding_type", "per_layer_token_embedding_type", "extra_output_tensor",
    "ffn_gate_inp_type",
)  # fmt: skip
CLASS_OPTIONS = tuple(f"{name}_type" for name in dict.fromkeys(n for names in _CLASS_OF_FIELD.values() for n in names))


_LEAVE_OUTPUT = "--leave-output-tensor"


def option_name(attribute: str) -> str:
    """Return the command line's spelling of an option of Request."""
    return "--" + attribute.replace("_", "-")


def option_classes(name: str, *, ik: bool = False) -> tuple[str, ...]:
    """Return the class options of Request, such as ("attn_q_type",), that apply to the tensor ``name``."""
    match = _FIELD.search(name)
    classes = _CLASS_OF_FIELD.get(match[1], ()) if match else ()
    if ik and MERGED not in name and classes != ("attn_qkv",):
        by_ik = type_rules_ik.class_of(name)
        classes = (by_ik,) if by_ik else ()
    return tuple(f"{c}_type" for c in classes)


def _class_type(request: Request, name: str) -> tuple[TensorType | None, Reason | None]:
    """Return the type of the class options and the reason; without a type, why they do not apply, or None."""
    classes = option_classes(name, ik=request.ik)
    if request.ik and classes == ("attn_qkv_type",) and request.attn_qkv_type is None:
        classes = ("attn_q_type",)  # ik_llama.cpp's search for attn_q also finds attn_qkv
    options = {option_name(o): getattr(request, o) for o in classes if getattr(request, o) is not None}
    types = set(options.values())
    if len(types) > 1:
        text = f"{' and '.join(options)} differ, so neither applies to this merged tensor"
        return None, Reason("class", text, tuple(options), "conflict")
    if not types:
        return None, None
    if len(options) == len(classes):
        return types.pop(), Reason("class", " and ".join(options), tuple(options))
    text = f"{' and '.join(options)}, which applies to both halves of the merged tensor"
    return types.pop(), Reason("class", text, tuple(options), "both halves")


# --- the choice ----------------------------------------------------------------------------------------------


def choose_types(
    facts: ModelFacts,
    tensors: Sequence[TensorLike],
    request: Request,
    mixed: Mapping[str, tuple[TensorType, ...]] | None = None,
) -> list[Choice]:
    """Return the type of every tensor, in the order given, which must be that of iteration_order().

    (With --keep-split, llama-quantize iterates by shard and offset, and ik_llama.cpp always uses the source's order:
    pass the tensors in that order.) ``mixed`` are the types of tensors whose parts differ in type; if nothing gives
    such a tensor a type, its choice is ``undecided``. Raises TypeNotSupported for sources that may not be re-quantized,
    and, with ``fallback="error"``, for rows that are not a multiple of the block.
    """
    type_rules = request.type_rules(facts)
    fallback = _fallback_of(request.fallback)
    parts = mixed or {}
    choices = [
        _fit(_choose(facts, t, request, type_rules, parts.get(t.name, ())), t, fallback, ik=request.ik) for t in tensors
    ]
    if request.fallback.lower() == "error":
        misfits = [c for c in choices if c.fallback_from is not None]
        _refuse(
            "the row length is not a multiple of the block size", misfits, "pass --fallback next, or a type", "QK-E303"
        )
    if request.like is not None:
        where = f"--like {request.like.path}"
        remedy = "set their types by rules or options, or use a file of this model"
        _refuse(f"{where} has no such tensors", [c for c in choices if c.step == "missing"], remedy, "QK-E207")
        misfits = [c for c in choices if c.step == "like" and c.fallback_from is not None]
        _refuse(f"{where}: its type does not fit", misfits, remedy, "QK-E303")
    if not request.allow_requantize:
        quantized = [c for c in choices if c.requantized]
        remedy = "use an f16, bf16 or f32 file, or --allow-requantize"
        _refuse("already quantized", quantized, remedy, "QK-E209")
    return choices


def _refuse(problem: str, choices: list[Choice], remedy: str, code: str) -> None:
    if not choices:
        return
    first = "; ".join(f"{c.name} ({c.source} to {c.fallback_from or c.type})" for c in choices[:3])
    suffix = f" and {len(choices) - 3} more" if len(choices) > 3 else ""
    raise TypeNotSupported(f"{problem}: {first}{suffix}; {remedy}", code)


def _choose(
    facts: ModelFacts, t: TensorLike, request: Request, type_rules: TypeRules | None, mixed: tuple[TensorType, ...]
) -> Choice:
    """Apply the five steps to one tensor; _fit() checks rows and shapes."""
    verdict = decide(request.rules, t.name)
    rule = verdict.rule

    def choice(target: TensorType, reason: Reason) -> Choice:
        return Choice(t.name, t.type, target, reason, rule=rule, mixed=mixed)

    if request.repack is not None:
        return choice(*request.repack.choose(t, contiguous_rows(t)))
    keep_reason = _keep_reason(facts, t, request)
    if (
        keep_reason is not None
        and request.like is not None
        and keep_reason != _LEAVE_OUTPUT
        and presets.is_target(t.type)
    ):
        return choice(*_reference_type(request.like, t))
    if keep_reason is not None:
        options = (_LEAVE_OUTPUT,) if keep_reason == _LEAVE_OUTPUT else ()
        adjustments = (f"{rule} does not apply",) if rule is not None and rule.type != t.type else ()
        own_type = request.own_types.get(t.name, t.type)
        return choice(own_type, Reason("kept", f"kept: {keep_reason}", options, adjustments=adjustments))
    # ik_llama.cpp counts all tensors
    suggested = type_rules.choose(t) if type_rules is not None and request.ik else None
    if (option := _tensor_option(request, t.name, rule is not None)) is not None:
        return choice(getattr(request, option), Reason("option", option_name(option), (option_name(option),)))
    if rule is not None:
        return choice(rule.type, Reason("rule", verdict.reason))
    class_type, class_reason = _class_type(request, t.name)
    if class_type is not None and class_reason is not None:
        return choice(class_type, class_reason)
    if request.like is not None:
        return choice(*_reference_type(request.like, t))
    base = request.preset.base
    if base is None:
        own_type = request.own_types.get(t.name, t.type)
        return choice(own_type, _with_conflict(class_reason, Reason("COPY", "COPY")))
    if type_rules is None:
        text = "--pure" if request.pure else f"{request.preset} for every tensor"
        return choice(base, _with_conflict(class_reason, Reason("preset", text)))
    target, reason = suggested or type_rules.choose(t)
    return choice(target, _with_conflict(class_reason, reason))


def _with_conflict(conflict: Reason | None, reason: Reason) -> Reason:
    """Return the reason of a tensor with contradictory class options, or None."""
    if conflict is None:
        return reason
    text, options = f"{conflict.text}; {reason.text}", (*conflict.options, *reason.options)
    return replace(reason, text=text, options=options, case=conflict.case)


def _keep_reason(facts: ModelFacts, t: TensorLike, request: Request) -> str | None:
    if not presets.is_target(t.type):
        return f"{t.type} values, not weights"
    if 0 in t.shape:
        return "no values"
    if n_dims(t.shape) < 2:
        return "a vector" if t.shape else "a scalar"
    if n_dims(t.shape) > GGML_DIMS:
        return f"more than ggml's {GGML_DIMS} dimensions"
    if ROUTER in t.name and t.name.endswith("weight"):
        return None if request.ffn_gate_inp_type else "the router (--ffn-gate-inp-type changes it)"
    if t.name == "output.weight" and request.leave_output_tensor:
        return _LEAVE_OUTPUT
    return unquantized_reason(t.name, facts.arch, request.ik)


def _reference_type(like: ReferenceTypes, t: TensorLike) -> tuple[TensorType, Reason]:
    """Return the type of a tensor in a file, and the reason."""
    match = like.find(t)
    if match is None:
        return t.type, Reason("missing", "no such tensor")
    return match[0], Reason("like", match[1])


def _tensor_option(request: Request, name: str, has_rule: bool) -> str | None:
    """Return the option for this particular tensor, if given."""
    if ROUTER in name:
        return "ffn_gate_inp_type"
    options = {
        "output.weight": "output_tensor_type",
        EXTRA_OUTPUT: "extra_output_tensor",
        "per_layer_token_embd.weight": "per_layer_token_embedding_type",
    }
    if (option := options.get(name)) is not None and getattr(request, option) is not None:
        return option
    if name not in TOKEN_EMBD_NAMES or request.token_embedding_type is None:
        return None
    return None if (has_rule or request.ik) and name == "per_layer_token_embd.weight" else "token_embedding_type"


def _fallback_of(fallback: str) -> TensorType | None:
    """Return the type that --fallback names; None for "next" and "error"."""
    if fallback.lower() in ("next", "error"):
        return None
    target = type_by_name(fallback)
    if not presets.is_target(target):
        raise TypeNotSupported(f"--fallback {target}: not a type for weights", "QK-E301")
    return target


def _fit(choice: Choice, t: TensorLike, fallback: TensorType | None, *, ik: bool) -> Choice:
    """Replace a type that does not fit the tensor's rows or shape."""
    if choice.copied:
        return choice
    target, n = choice.type, t.shape[0]
    if n % target.block:
        fallback_type = fallback or presets.next_type(target, ik=ik)
        if n % fallback_type.block:
            fallback_type = presets.next_dividing(fallback_type, n, ik=ik)
        note = ", where llama-quantize fails" if target.name in presets.FALLBACK_QUANTKIT and fallback is None else ""
        text = f"rows of {n} are not a multiple of {target}'s blocks of {target.block}: {fallback_type}{note}"
        choice = replace(choice, type=fallback_type, reason=choice.reason.adjust(text), fallback_from=target)
    return _without_interleaving(choice, t)


def contiguous_rows(t: TensorLike) -> int:
    """Return the number of rows that every cut of a tensor keeps together: the gcd of its and its parts' rows."""
    return math.gcd(t.shape[1] if len(t.shape) > 1 else 1, *(part.row_alignment for part in getattr(t, "parts", ())))


def _without_interleaving(choice: Choice, t: TensorLike) -> Choice:
    plain = presets.without_interleaving(choice.type)
    if plain == choice.type:
        return choice
    if t.shape[0] % plain.block:  # IQ1_S_R4 has blocks of 32, IQ1_S of 256
        plain = presets.next_dividing(plain, t.shape[0], ik=True)
    if t.name in TOKEN_EMBD_NAMES:
        return replace(choice, type=plain, reason=choice.reason.adjust(f"embeddings are read row by row: {plain}"))
    rows = contiguous_rows(t)
    if can_interleave(choice.type, t.shape[0], rows):
        return choice
    values = f" of {t.shape[0]}" if rows % choice.type.interleave == 0 else ""
    text = f"{rows} rows{values} are not a multiple of {choice.type.interleave} interleaved rows: {plain}"
    first = choice.fallback_from or choice.type
    return replace(choice, type=plain, reason=choice.reason.adjust(text), fallback_from=first)


# --- checks --------------------------------------------------------------------------------------------------


#: Warnings about merged experts that cannot have the requested types.
MERGE_LINTS = ("QK-W012", "QK-W013")


def lint_request(request: Request, tensors: Sequence[TensorLike], choices: Sequence[Choice]) -> list[Lint]:
    """Return warnings about a request, starting with the findings of recipe.lint_rules.

    QK-W006 a rule has no effect, because options or never-quantized tensors come first; QK-W007 an option has no
    effect; QK-W008 NVFP4 without its tensor-wide scales; QK-W010 llama-quantize would ignore the rules; QK-W011 no
    runtime has all the types; QK-W012 --ffn-gate-type and --ffn-up-type differ, but experts are merged; QK-W015 one of
    them alone applies to merged experts; QK-W016 ik_llama.cpp would ignore a class option.
    """
    lints = lint_rules(request.rules, [t.name for t in tensors])
    lints += _lint_overridden(request, choices)
    lints += _lint_idle_options(request, choices)
    lints += _lint_types(request, choices)
    return lints


def _lint_overridden(request: Request, choices: Sequence[Choice]) -> list[Lint]:
    effective = {id(c.rule) for c in choices if c.step == "rule"}
    overridden: dict[int, list[Choice]] = {}
    for c in choices:
        if c.rule is not None and id(c.rule) not in effective and c.rule.type != c.type:
            overridden.setdefault(id(c.rule), []).append(c)
    lints = []
    for rule in request.rules:
        if losses := overridden.get(id(rule)):
            names = abbreviate([c.name for c in losses])
            lints.append(Lint("QK-W006", f"{rule} has no effect: {names}: {losses[0].reason.text}"))
    return lints


def _lint_idle_options(request: Request, choices: Sequence[Choice]) -> list[Lint]:
    options = {option_name(o): o for o in (*TENSOR_OPTIONS, *CLASS_OPTIONS) if getattr(request, o) is not None}
    options |= {_LEAVE_OUTPUT: "leave_output_tensor"} if request.leave_output_tensor else {}
    return [
        Lint("QK-W007", f"{option} has no effect: {_idle_reason(request, option, attribute, choices)}")
        for option, attribute in options.items()
        if not any(option in c.reason.options for c in choices)
    ]


def _idle_reason(request: Request, option: str, attribute: str, choices: Sequence[Choice]) -> str:
    """Return the reason why an option has no effect: another one takes precedence, or no tensor is of its class."""
    if "output" in option and option.startswith(("--output", "--leave")) and _is_tied(choices):
        return "the model has no output.weight, its token embeddings are the output"
    losses = [
        c
        for c in choices
        if attribute in (_tensor_option(request, c.name, False), *option_classes(c.name, ik=request.ik))
    ]
    return f"{abbreviate([c.name for c in losses])}: {losses[0].reason.text}" if losses else "it matches no tensor"


def _is_tied(choices: Sequence[Choice]) -> bool:
    return all(c.name != "output.weight" for c in choices)


def _lint_types(request: Request, choices: Sequence[Choice]) -> list[Lint]:
    preset = request.preset
    encoded_types = {c.type.name for c in choices if not c.copied}
    lints: list[tuple[str, str]] = []
    if "NVFP4" in encoded_types:
        lints.append(("QK-W008", "NVFP4 is written without the per-tensor scale of NVIDIA's checkpoints; llama.cpp "
            "loads the file, but its error is larger"))  # fmt: skip
    unmixed = preset.base is None or not preset.base.is_quantized
    if any(c.step == "rule" for c in choices) and request.like is None and (unmixed or (request.ik and request.pure)):
        situation = f"when TYPE is {preset}" if unmixed else "with --pure"
        lints.append(("QK-W010", f"llama-quantize ignores rules {situation}; quantkit applies them"))
    ik, mainline = (sorted({c.type.name for c in choices if c.type.trees == tree}) for tree in ("ik", "mainline"))
    if ik and mainline:
        lints.append(("QK-W011", f"no runtime loads both {', '.join(ik)} (ik_llama.cpp) and {', '.join(mainline)} "
                                 f"(llama.cpp)"))  # fmt: skip
    if own_types := sorted({c.type.name for c in choices if c.type.trees == "none"}):
        lints.append(
            (
                "QK-W011",
                f"no runtime loads {', '.join(own_types)}: neither llama.cpp nor ik_llama.cpp has such a type",
            )
        )
    if conflicts := [c.name for c in choices if c.reason.case == "conflict"]:
        lints.append(("QK-W012", f"--ffn-gate-type and --ffn-up-type differ, so neither applies to merged "
                                 f"{abbreviate(conflicts)}; give both the same type"))  # fmt: skip
    if both := [c for c in choices if c.reason.case == "both halves"]:
        option, names = " and ".join(both[0].reason.options), abbreviate([c.name for c in both])
        lints.append(("QK-W015", f"{option} applies to both halves of merged {names}"))
    effective = {option for c in choices if c.step == "class" and not c.reason.case for option in c.reason.options}
    for option in CLASS_OPTIONS if request.ik else ():
        is_respected = (
            not unmixed
            and not request.pure
            and type_rules_ik.respects_option(preset.name, option.removesuffix("_type"))
        )
        if option_name(option) in effective and not is_respected:
            where = "with --pure" if request.pure else f"in {preset}"
            lints.append(("QK-W016", f"ik_llama.cpp ignores {option_name(option)} {where}; quantkit applies it"))
    return [Lint(code, message) for code, message in lints]
