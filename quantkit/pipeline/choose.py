"""Which type each tensor gets, and why.

The first of these steps that applies to a tensor decides its type:

    1. kept        integers, vectors, norms, the router and some small tensors stay as they are. Nothing below
                   changes them, except --ffn-gate-inp-type for the router.
    2. own option  --token-embedding-type, --per-layer-token-embedding-type, --output-tensor-type,
                   --extra-output-tensor, --ffn-gate-inp-type. (One exception, as in llama.cpp: a rule for
                   per_layer_token_embd.weight beats --token-embedding-type.)
    3. rules       -r/--recipe, --tensor-type, --tensor-type-file, --custom-q, in the order given; the first match.
    4. class       --attn-{q,k,v,qkv,output}-type, --ffn-{gate,up,down}-type.
    5. preset      COPY keeps the type; --pure, a plain type or a float gives the base type; else the mixture.
                   With --like, the type in that file, which tensors that are kept otherwise have, too.

With --repack or --unrepack none of them is asked (repack.py).

Afterwards, in any case, rows that do not divide into blocks get the fallback (--fallback), and interleaved types
become plain ones in embeddings and where the rows do not divide into groups.

By llama.cpp's rules the result equals llama-quantize b11434's for every tensor, including counters and oddities; they
are from src/llama-quant.cpp (tensor_allows_quantization, llama_tensor_get_type, tensor_type_fallback). By ik's (--rules
ik) it equals that of ik_llama.cpp 8337e4cd3, src/llama-quantize.cpp (the loop of llama_model_quantize_internal,
llama_tensor_get_type, change_type_if_necessary). Class options then apply to the tensors that ik applies them to, such
as --attn-k-type to attn_kv_b, too.

Options that have no effect there (rules and class options with --pure, COPY or a float preset; most class options in
ik's presets of few bits; --attn-qkv-type in ik) have one here. Where a peer would stop, or write rows that cannot be
read (interleaved per_layer_token_embd), the nearest type that works is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.errors import TypeNotSupported
from quantkit.formats.experts import MERGED
from quantkit.kernels.interleave import repacks, weaves_together
from quantkit.pipeline import mixture_ik, presets
from quantkit.pipeline.facts import (
    EXTRA_OUTPUT,
    ROUTER,
    TOKEN_EMBD_NAMES,
    ModelFacts,
    TensorLike,
    category,
    iteration_order,
    n_dims,
    why_never,
)
from quantkit.pipeline.like import Like
from quantkit.pipeline.mixture import Mixture
from quantkit.pipeline.mixture_ik import IkMixture
from quantkit.pipeline.mixture_mainline import MainlineMixture
from quantkit.pipeline.presets import Preset
from quantkit.pipeline.recipe import Lint, Rule, and_more, decide, lint_rules
from quantkit.pipeline.repack import Repack
from quantkit.types import TensorType, type_by_name

__all__ = [
    "Choice", "Lint", "ModelFacts", "Request", "Rule", "category", "choose_types", "iteration_order", "lint_request",
    "option_classes",
]  # fmt: skip


# --- the request ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for: TYPE and the options about types.

    ``tree`` is whose rules apply, "mainline" or "ik", by default the preset's. ``fallback``: "next", "error" or a type.
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
    like: Like | None = None

    @property
    def copy(self) -> bool:
        """True for COPY: tensors stay as they are, except those that an option or rule names."""
        return self.preset.base is None

    @property
    def ik(self) -> bool:
        """True if ik_llama.cpp's rules apply."""
        return (self.tree or presets.rules_of(self.preset)) == "ik"

    def mixture(self, facts: ModelFacts) -> Mixture | None:
        """Return the preset's mixture; None if every tensor gets the base type, or keeps its own."""
        base = self.preset.base
        if base is None or self.like or self.pure or not self.preset.mixes or not base.is_quantized:
            return None
        kind = IkMixture if self.ik else MainlineMixture
        return kind(facts, self.preset, base, self.has_imatrix, self.output_tensor_type)


@dataclass(frozen=True, slots=True)
class Choice:
    """The type one tensor gets, and why.

    ``by`` is what decided: "kept", "option", "rule", "class", "COPY", "repack", "like", "unlike" (the file that is to
    decide has no such tensor) or "preset". ``fallback_from`` is the
    type that the rows or the shape do not allow. ``rule`` is the matching rule, whether it decided or not. ``mixed``
    are the types of a tensor's parts if they differ; ``source_type`` is then the first.
    """

    name: str
    source_type: TensorType
    type: TensorType
    reason: str
    by: str
    fallback_from: TensorType | None = None
    rule: Rule | None = None
    mixed: tuple[TensorType, ...] = ()

    @property
    def copied(self) -> bool:
        """True if the bytes stay as they are."""
        return self.type == self.source_type and not self.mixed

    @property
    def repacked(self) -> bool:
        """True if values stay as they are, and rows are interleaved or taken apart."""
        return not self.copied and all(
            t is self.type or repacks(t, self.type) for t in self.mixed or (self.source_type,)
        )

    @property
    def undecided(self) -> bool:
        """True if parts of different types keep them, so that they cannot become one tensor."""
        return bool(self.mixed) and self.by in ("kept", "COPY", "repack")

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
OWN_OPTIONS = (
    "output_tensor_type", "token_embedding_type", "per_layer_token_embedding_type", "extra_output_tensor",
    "ffn_gate_inp_type",
)  # fmt: skip
CLASS_OPTIONS = tuple(f"{name}_type" for name in dict.fromkeys(n for names in _CLASS_OF_FIELD.values() for n in names))


_LEFT = "--leave-output-tensor"
_BOTH_HALVES = "which applies to both halves of the merged tensor"


def option_name(attribute: str) -> str:
    """Return the command line's spelling of an option of Request."""
    return "--" + attribute.replace("_", "-")


def option_classes(name: str, *, ik: bool = False) -> tuple[str, ...]:
    """Return the class options of Request, such as ("attn_q_type",), that apply to the tensor ``name``."""
    found = _FIELD.search(name)
    classes = _CLASS_OF_FIELD.get(found[1], ()) if found else ()
    if ik and MERGED not in name and classes != ("attn_qkv",):
        by_ik = mixture_ik.class_of(name)
        classes = (by_ik,) if by_ik else ()
    return tuple(f"{c}_type" for c in classes)


def _by_class(request: Request, name: str) -> tuple[TensorType | None, str]:
    """Return a type and its reason from the class options, or None and a remark, which is mostly empty."""
    classes = option_classes(name, ik=request.ik)
    if request.ik and classes == ("attn_qkv_type",) and request.attn_qkv_type is None:
        classes = ("attn_q_type",)  # ik finds attn_q in attn_qkv
    given = {option_name(o): getattr(request, o) for o in classes if getattr(request, o) is not None}
    types = set(given.values())
    if len(types) > 1:
        return None, f"{' and '.join(given)} differ, so neither applies to this merged tensor; "
    half = "" if len(given) == len(classes) else f", {_BOTH_HALVES}"
    return (types.pop(), " and ".join(given) + half) if types else (None, "")


# --- the choice ----------------------------------------------------------------------------------------------


def choose_types(
    facts: ModelFacts,
    tensors: Sequence[TensorLike],
    request: Request,
    mixed: Mapping[str, tuple[TensorType, ...]] | None = None,
) -> list[Choice]:
    """Return the type of every tensor, in the order given, which must be that of iteration_order().

    (With --keep-split llama-quantize goes by shard and offset instead, and ik_llama.cpp always goes as the source does:
    give the tensors in that order.)
    ``mixed`` are the types of tensors whose parts differ in type; if nothing gives such a tensor a type, its choice is
    ``undecided``.
    Raises TypeNotSupported for sources that may not be re-quantized, and for rows that do not divide into blocks with
    ``fallback="error"``.
    """
    mixture = request.mixture(facts)
    fallback = _fallback_of(request.fallback)
    parts = mixed or {}
    choices = [
        _fit(_choose(facts, t, request, mixture, parts.get(t.name, ())), t, fallback, ik=request.ik) for t in tensors
    ]
    if request.fallback.lower() == "error":
        misfits = [c for c in choices if c.fallback_from is not None]
        _refuse("rows do not divide into blocks", misfits, "pass --fallback next, or a type")
    if request.like is not None:
        where = f"--like {request.like.path}"
        remedy = "give their types by rules or options, or a file of this model"
        _refuse(f"{where} has no such tensors", [c for c in choices if c.by == "unlike"], remedy)
        misfits = [c for c in choices if c.by == "like" and c.fallback_from is not None]
        _refuse(f"{where}: a type there does not fit here", misfits, remedy)
    if not request.allow_requantize:
        quantized = [c for c in choices if c.requantized]
        _refuse("already quantized", quantized, "start from an f16, bf16 or f32 file, or pass --allow-requantize")
    return choices


def _refuse(what: str, choices: list[Choice], remedy: str) -> None:
    if not choices:
        return
    first = "; ".join(f"{c.name} ({c.source} to {c.fallback_from or c.type})" for c in choices[:3])
    more = f" and {len(choices) - 3} more" if len(choices) > 3 else ""
    raise TypeNotSupported(f"{what}: {first}{more}; {remedy}")


def _choose(
    facts: ModelFacts, t: TensorLike, request: Request, mixture: Mixture | None, mixed: tuple[TensorType, ...]
) -> Choice:
    """Take the five steps for one tensor; _fit() checks rows and shapes."""
    verdict = decide(request.rules, t.name)
    rule = verdict.rule

    def choice(found: TensorType, by: str, reason: str) -> Choice:
        return Choice(t.name, t.type, found, reason, by, rule=rule, mixed=mixed)

    if request.repack is not None:
        found, why = request.repack.choose(t, rows_together(t))
        return choice(found, "repack", why)
    kept = _why_kept(facts, t, request)
    if kept is not None and request.like is not None and kept != _LEFT and presets.is_target(t.type):
        return choice(*_like(request.like, t))
    if kept is not None:
        beaten = f"; {rule} does not apply" if rule is not None and rule.type != t.type else ""
        return choice(t.type, "kept", f"kept: {kept}{beaten}")
    suggested = mixture.choose(t) if mixture is not None and request.ik else None  # in ik, all tensors count
    if (own := _own_option(request, t.name, rule is not None)) is not None:
        return choice(getattr(request, own), "option", option_name(own))
    if rule is not None:
        return choice(rule.type, "rule", verdict.reason)
    by_class, remark = _by_class(request, t.name)
    if by_class is not None:
        return choice(by_class, "class", remark)
    if request.like is not None:
        return choice(*_like(request.like, t))
    base = request.preset.base
    if base is None:
        return choice(t.type, "COPY", f"{remark}COPY")
    if mixture is None:
        why = "--pure" if request.pure else f"{request.preset}, no mixture"
        return choice(base, "preset", remark + why)
    found, why = suggested or mixture.choose(t)
    return choice(found, "preset", remark + why)


def _why_kept(facts: ModelFacts, t: TensorLike, request: Request) -> str | None:
    if not presets.is_target(t.type):
        return f"{t.type} values, not weights"
    if n_dims(t.shape) < 2:
        return "a vector"
    if ROUTER in t.name and t.name.endswith("weight"):
        return None if request.ffn_gate_inp_type else "the router (--ffn-gate-inp-type changes it)"
    if t.name == "output.weight" and request.leave_output_tensor:
        return _LEFT
    return why_never(t.name, facts.arch, request.ik)


def _like(like: Like, t: TensorLike) -> tuple[TensorType, str, str]:
    """Return the type that a tensor has in a file, what decided, and why."""
    found = like.find(t)
    return (t.type, "unlike", "no such tensor") if found is None else (found[0], "like", found[1])


def _own_option(request: Request, name: str, has_rule: bool) -> str | None:
    """Return the option for this particular tensor, if given."""
    if ROUTER in name:
        return "ffn_gate_inp_type"
    options = {
        "output.weight": "output_tensor_type",
        EXTRA_OUTPUT: "extra_output_tensor",
        "per_layer_token_embd.weight": "per_layer_token_embedding_type",
    }
    if (own := options.get(name)) is not None and getattr(request, own) is not None:
        return own
    if name not in TOKEN_EMBD_NAMES or request.token_embedding_type is None:
        return None
    return None if (has_rule or request.ik) and name == "per_layer_token_embd.weight" else "token_embedding_type"


def _fallback_of(fallback: str) -> TensorType | None:
    """Return the type that --fallback names; None for "next" and "error"."""
    if fallback.lower() in ("next", "error"):
        return None
    found = type_by_name(fallback)
    if not presets.is_target(found):
        raise TypeNotSupported(f"--fallback {found}: not a type for weights")
    return found


def _fit(choice: Choice, t: TensorLike, fallback: TensorType | None, *, ik: bool) -> Choice:
    """Replace a type that does not fit the tensor's rows or shape."""
    wanted, n = choice.type, t.shape[0]
    if choice.copied:
        return choice
    if n % wanted.block:
        found = fallback or presets.next_type(wanted, ik=ik)
        if n % found.block:
            found = presets.next_dividing(found, n, ik=ik)
        note = ", where llama-quantize would stop" if wanted.name in presets.FALLBACK_OURS and fallback is None else ""
        reason = f"{choice.reason}; rows of {n} do not divide into {wanted}'s blocks of {wanted.block}: {found}{note}"
        choice = replace(choice, type=found, reason=reason, fallback_from=wanted)
    return _unweave(choice, t)


def rows_together(t: TensorLike) -> int:
    """Return how many rows of a tensor lie together wherever it is cut: by matrix, or into what it is made of."""
    return math.gcd(t.shape[1] if len(t.shape) > 1 else 1, *(part.rows_apart for part in getattr(t, "parts", ())))


def _unweave(choice: Choice, t: TensorLike) -> Choice:
    plain = presets.without_weave(choice.type)
    if plain == choice.type:
        return choice
    if t.shape[0] % plain.block:  # IQ1_S_R4 has blocks of 32, IQ1_S of 256
        plain = presets.next_dividing(plain, t.shape[0], ik=True)
    if t.name in TOKEN_EMBD_NAMES:
        return replace(choice, type=plain, reason=f"{choice.reason}; embeddings are read row by row: {plain}")
    rows = rows_together(t)
    if weaves_together(choice.type, t.shape[0], rows):
        return choice
    values = f" of {t.shape[0]}" if rows % choice.type.interleave == 0 else ""
    why = f"{rows} rows{values} do not divide into groups of {choice.type.interleave}: {plain}"
    first = choice.fallback_from or choice.type
    return replace(choice, type=plain, reason=f"{choice.reason}; {why}", fallback_from=first)


# --- checks --------------------------------------------------------------------------------------------------


#: Lints about merged experts that cannot have the types asked for.
TORN = ("QK-W012", "QK-W013")


def lint_request(request: Request, tensors: Sequence[TensorLike], choices: Sequence[Choice]) -> list[Lint]:
    """Return what the user should know before any work, starting with the findings of recipe.lint_rules.

    QK-W006 a rule has no effect, because options or never-quantized tensors come first; QK-W007 an option has no
    effect; QK-W008 NVFP4 without its tensor-wide scales; QK-W010 llama-quantize would ignore the rules; QK-W011 no
    runtime has all the types; QK-W012 --ffn-gate-type and --ffn-up-type differ, but experts are merged; QK-W015 one of
    them alone applies to merged experts; QK-W016 ik_llama.cpp would ignore a class option.
    """
    lints = lint_rules(request.rules, [t.name for t in tensors])
    lints += _lint_beaten(request, choices)
    lints += _lint_idle_options(request, choices)
    lints += _lint_types(request, choices)
    return lints


def _lint_beaten(request: Request, choices: Sequence[Choice]) -> list[Lint]:
    won = {id(c.rule) for c in choices if c.by == "rule"}
    beaten: dict[int, list[Choice]] = {}
    for c in choices:
        if c.rule is not None and id(c.rule) not in won and c.rule.type != c.type:
            beaten.setdefault(id(c.rule), []).append(c)
    lints = []
    for rule in request.rules:
        if lost := beaten.get(id(rule)):
            why = lost[0].reason.split(";")[0]
            lints.append(Lint("QK-W006", f"{rule} has no effect: {and_more([c.name for c in lost])}: {why}"))
    return lints


def _lint_idle_options(request: Request, choices: Sequence[Choice]) -> list[Lint]:
    options = [option_name(o) for o in (*OWN_OPTIONS, *CLASS_OPTIONS) if getattr(request, o) is not None]
    options += ["--leave-output-tensor"] if request.leave_output_tensor else []
    lints = []
    for option in options:
        if any(re.search(rf"{option}(?![-\w])", c.reason) for c in choices):
            continue
        tied = "output" in option and option.startswith(("--output", "--leave")) and _is_tied(choices)
        why = "there is no output.weight, the token embeddings are the output" if tied else "it applies to no tensor"
        lints.append(Lint("QK-W007", f"{option} has no effect: {why}"))
    return lints


def _is_tied(choices: Sequence[Choice]) -> bool:
    return all(c.name != "output.weight" for c in choices)


def _lint_types(request: Request, choices: Sequence[Choice]) -> list[Lint]:
    preset = request.preset
    made = {c.type.name for c in choices if not c.copied}
    found: list[tuple[str, str]] = []
    if "NVFP4" in made:
        found.append(("QK-W008", "NVFP4 is written without the per-tensor scale of NVIDIA's checkpoints; llama.cpp "
                                 "loads it, but the error is larger"))  # fmt: skip
    unmixed = preset.base is None or not preset.base.is_quantized
    if any(c.by == "rule" for c in choices) and request.like is None and (unmixed or (request.ik and request.pure)):
        when = f"when TYPE is {preset}" if unmixed else "with --pure"
        found.append(("QK-W010", f"llama-quantize ignores rules {when}; here they apply"))
    ik, mainline = (sorted({c.type.name for c in choices if c.type.trees == tree}) for tree in ("ik", "mainline"))
    if ik and mainline:
        found.append(("QK-W011", f"no runtime loads both {', '.join(ik)} (ik_llama.cpp) and {', '.join(mainline)} "
                                 f"(llama.cpp)"))  # fmt: skip
    if torn := [c.name for c in choices if "neither applies to this merged tensor" in c.reason]:
        found.append(("QK-W012", f"--ffn-gate-type and --ffn-up-type differ, so neither applies to merged "
                                 f"{and_more(torn)}; give both the same type"))  # fmt: skip
    if both := [c for c in choices if c.by == "class" and _BOTH_HALVES in c.reason]:
        option = both[0].reason.split(",")[0]
        found.append(("QK-W015", f"{option} applies to both halves of merged {and_more([c.name for c in both])}"))
    heard = {o for c in choices if c.by == "class" for o in CLASS_OPTIONS if option_name(o) in c.reason.split(" and ")}
    for option in CLASS_OPTIONS if request.ik else ():
        heeds = not unmixed and not request.pure and mixture_ik.heeds(preset.name, option.removesuffix("_type"))
        if option in heard and not heeds:
            where = "with --pure" if request.pure else f"in {preset}"
            found.append(("QK-W016", f"ik_llama.cpp ignores {option_name(option)} {where}; here it applies"))
    return [Lint(code, message) for code, message in found]
