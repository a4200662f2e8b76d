"""Which type each tensor gets, and why.

The first of these steps that applies to a tensor decides its type:

    1. kept        integers, vectors, norms, the router and some small tensors stay as they are. Nothing below
                   changes them, except --ffn-gate-inp-type for the router.
    2. own option  --token-embedding-type, --output-tensor-type, --ffn-gate-inp-type. (One exception, as in
                   llama.cpp: a rule for per_layer_token_embd.weight beats --token-embedding-type.)
    3. rules       -r/--recipe, --tensor-type, --tensor-type-file, --custom-q, in the order given; the first match.
    4. class       --attn-{q,k,v,qkv,output}-type, --ffn-{gate,up,down}-type.
    5. preset      COPY keeps the type; --pure, a plain type or a float gives the base type; else the mixture.

With --repack or --unrepack none of them is asked (repack.py).

Afterwards, in any case, rows that do not divide into blocks get the fallback (--fallback), and interleaved types
become plain ones in embeddings and where the rows do not divide into groups.

For llama.cpp's presets the result equals llama-quantize b11434's for every tensor, including counters and oddities;
the rules are from src/llama-quant.cpp (tensor_allows_quantization, llama_tensor_get_type, tensor_type_fallback).
Options that have no effect there (rules with COPY or a float preset, the class options of ik_llama.cpp) have one here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantkit.errors import TypeNotSupported
from quantkit.kernels.interleave import repacks, weaves_together
from quantkit.pipeline import presets
from quantkit.pipeline.facts import (
    ATTN_V_LIKE,
    ROUTER,
    TOKEN_EMBD_NAMES,
    ModelFacts,
    TensorLike,
    category,
    iteration_order,
    layer_of,
    n_dims,
    why_never,
)
from quantkit.pipeline.presets import Place, Preset, Table
from quantkit.pipeline.recipe import Lint, Rule, and_more, decide, lint_rules
from quantkit.pipeline.repack import Repack
from quantkit.types import BY_NAME, TensorType, type_by_name

__all__ = [
    "Choice", "Lint", "ModelFacts", "Request", "Rule", "category", "choose_types", "iteration_order", "lint_request",
    "option_classes",
]  # fmt: skip


# --- the request ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for: TYPE and the options about types. ``fallback``: "next", "error" or a type."""

    preset: Preset
    rules: tuple[Rule, ...] = ()
    output_tensor_type: TensorType | None = None
    token_embedding_type: TensorType | None = None
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

    @property
    def copy(self) -> bool:
        """True for COPY: tensors stay as they are, except those that an option or rule names."""
        return self.preset.base is None


@dataclass(frozen=True, slots=True)
class Choice:
    """The type one tensor gets, and why.

    ``by`` is what decided: "kept", "option", "rule", "class", "COPY", "repack" or "preset". ``fallback_from`` is the
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
OWN_OPTIONS = ("output_tensor_type", "token_embedding_type", "ffn_gate_inp_type")
CLASS_OPTIONS = tuple(f"{name}_type" for name in dict.fromkeys(n for names in _CLASS_OF_FIELD.values() for n in names))


_BOTH_HALVES = "which applies to both halves of the merged tensor"


def option_name(attribute: str) -> str:
    """Return the command line's spelling of an option of Request."""
    return "--" + attribute.replace("_", "-")


def option_classes(name: str) -> tuple[str, ...]:
    """Return the class options of Request, such as ("attn_q_type",), that apply to the tensor ``name``."""
    found = _FIELD.search(name)
    return tuple(f"{c}_type" for c in _CLASS_OF_FIELD.get(found[1], ())) if found else ()


def _by_class(request: Request, name: str) -> tuple[TensorType | None, str]:
    """Return a type and its reason from the class options, or None and a remark, which is mostly empty."""
    given = {option_name(o): getattr(request, o) for o in option_classes(name) if getattr(request, o) is not None}
    types = set(given.values())
    if len(types) > 1:
        return None, f"{' and '.join(given)} differ, so neither applies to this merged tensor; "
    half = "" if len(given) == len(option_classes(name)) else f", {_BOTH_HALVES}"
    return (types.pop(), " and ".join(given) + half) if types else (None, "")


# --- the mixture ---------------------------------------------------------------------------------------------


#: Never below Q8_0 in glm5-next.
_Q8_0_GLM5_NEXT = ("attn_q_a", "attn_q_b", "nextn.eh_proj")


@dataclass(slots=True)
class _Mixture:
    """llama.cpp's mixture of one preset, applied tensor by tensor; the layer counters are its only state."""

    facts: ModelFacts
    request: Request
    base: TensorType
    counters: dict[str, int] = field(default_factory=lambda: {"attn_v": 0, "ffn_down": 0, "ffn_gate": 0, "ffn_up": 0})

    def choose(self, t: TensorLike) -> tuple[TensorType, str]:
        """Return the type of the next tensor, and why; only for tensors that the mixture decides."""
        preset, cat = self.request.preset.name, category(t.name)
        if self.facts.arch == "glm5-next" and any(text in t.name for text in _Q8_0_GLM5_NEXT):
            return BY_NAME["Q8_0"], f"{preset}: never less in glm5-next"
        if cat == "output" or (cat == "token_embd" and not self.facts.has_output):
            return self._output(t)
        if preset == "MXFP4_MOE":
            return self._mxfp4_moe(t, cat)
        if cat == "token_embd":
            found = presets.TOKEN_EMBD.get(preset)
            return (BY_NAME[found], f"{preset}: embeddings") if found else self._base()
        if preset in presets.LOW_BIT_PRESETS:
            return self._low_bit(t, cat)
        return self._layer(t, cat)

    def _output(self, t: TensorLike) -> tuple[TensorType, str]:
        preset = self.request.preset.name
        what = "output" if self.facts.has_output else "embeddings, which are also the output"
        if self.request.output_tensor_type is not None:  # only tied embeddings get here with this option
            return self.request.output_tensor_type, "--output-tensor-type, for the tied embeddings"
        if self.facts.arch == "falcon" or preset == "MXFP4_MOE" or t.shape[0] % self.base.block:
            return BY_NAME["Q8_0"], f"{preset}: {what}"
        if preset in presets.OUTPUT_Q5_K:
            return BY_NAME["Q5_K"], f"{preset}: {what}"
        if self.base.name == "Q8_0":
            return self._base()
        return BY_NAME["Q6_K"], f"{preset}: {what}"

    def _mxfp4_moe(self, t: TensorLike, cat: str) -> tuple[TensorType, str]:
        # MLA projections also have three dimensions, so bailingmoe3's experts are recognized by name.
        many = len(t.shape) > 2 and t.shape[2] > 1
        if many and (self.facts.arch != "bailingmoe3" or cat.startswith("ffn_")):
            return BY_NAME["MXFP4"], "MXFP4_MOE: experts"
        return BY_NAME["Q8_0"], "MXFP4_MOE: all but experts"

    def _low_bit(self, t: TensorLike, cat: str) -> tuple[TensorType, str]:
        cat = "attn_v" if cat in ATTN_V_LIKE else cat
        place = self._place(cat)
        # ffn_down counts tensors here, even if experts make that differ from layers.
        if cat in ("attn_v", "ffn_down"):
            self.counters[cat] += 1
        return self._from_table(presets.LOW_BIT.get(cat, {}), cat, place)

    def _layer(self, t: TensorLike, cat: str) -> tuple[TensorType, str]:
        falcon = self.facts.arch == "falcon"
        if cat in ATTN_V_LIKE:
            return self._attn_v()
        if cat == "attn_k" and self.facts.n_expert == 8:
            return BY_NAME["Q8_0"], f"{self.request.preset}: attn_k, 8 experts"
        if cat in ("attn_k", "attn_q"):
            return self._from_table(presets.ATTN_K_Q, cat, self._place(cat))
        if cat == "attn_output":
            table = presets.ATTN_OUTPUT_FALCON if falcon else presets.ATTN_OUTPUT
            return self._from_table(table, cat, self._place(cat))
        if cat in ("ffn_gate", "ffn_up", "ffn_down"):
            place = self._place(cat, t.name)
            self.counters[cat] += 1
            down = presets.FFN_DOWN_FALCON if falcon else presets.FFN_DOWN
            return self._from_table(down if cat == "ffn_down" else presets.FFN_GATE_UP, cat, place)
        return self._base()

    def _attn_v(self) -> tuple[TensorType, str]:
        found, why = self._from_table(presets.ATTN_V, "attn_v", self._place("attn_v"))
        self.counters["attn_v"] += 1
        if self.facts.n_expert == 8:
            return BY_NAME["Q8_0"], f"{self.request.preset}: attn_v, 8 experts"
        if self.facts.is_70b and found.name in presets.ATTN_V_70B:
            return BY_NAME[presets.ATTN_V_70B[found.name]], f"{self.request.preset}: attn_v of a 70B model"
        return found, why

    def _from_table(self, table: Table, cat: str, place: Place) -> tuple[TensorType, str]:
        found = presets.pick(table, self.request.preset.name, place)
        if found is None:
            return self._base()
        why = "" if found[1] == "always" else f", {found[1]}"
        return found[0], f"{self.request.preset}: {cat}{why}"

    def _base(self) -> tuple[TensorType, str]:
        return self.base, f"base of {self.request.preset}"

    def _place(self, cat: str, name: str | None = None) -> Place:
        """Return the place of the next tensor of a category; with experts, an FFN's layer comes from its ``name``."""
        f = self.facts
        i = self.counters.get(cat, 0)
        if name is not None and f.n_expert > 1 and layer_of(name) >= 0:
            i = layer_of(name)
        n = f.n_attention_wv if cat == "attn_v" else f.n_layer
        return Place(i, n, f.n_gqa, f.n_expert, self.request.has_imatrix)


# --- the choice ----------------------------------------------------------------------------------------------


def choose_types(
    facts: ModelFacts,
    tensors: Sequence[TensorLike],
    request: Request,
    mixed: Mapping[str, tuple[TensorType, ...]] | None = None,
) -> list[Choice]:
    """Return the type of every tensor, in the order given, which must be that of iteration_order().

    (With --keep-split llama-quantize goes by shard and offset instead: give the tensors in that order.)
    ``mixed`` are the types of tensors whose parts differ in type; if nothing gives such a tensor a type, its choice is
    ``undecided``.
    Raises TypeNotSupported for sources that may not be re-quantized, for rows that do not divide into blocks with
    ``fallback="error"``, and for a preset whose mixture is unknown.
    """
    if request.preset.mixes and request.preset.trees == "ik":
        raise TypeNotSupported(f"this version lacks the mixture of ik_llama.cpp's {request.preset}; "
                               f"take the preset from preset_by_name()")  # fmt: skip
    base = request.preset.base
    mixture = _Mixture(facts, request, base) if base is not None else None
    fallback = _fallback_of(request.fallback)
    parts = mixed or {}
    choices = [_fit(_choose(facts, t, request, mixture, parts.get(t.name, ())), t, fallback) for t in tensors]
    if request.fallback.lower() == "error":
        misfits = [c for c in choices if c.fallback_from is not None]
        _refuse("rows do not divide into blocks", misfits, "pass --fallback next, or a type")
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
    facts: ModelFacts, t: TensorLike, request: Request, mixture: _Mixture | None, mixed: tuple[TensorType, ...]
) -> Choice:
    """Take the five steps for one tensor; _fit() checks rows and shapes."""
    verdict = decide(request.rules, t.name)
    rule = verdict.rule

    def choice(found: TensorType, by: str, reason: str) -> Choice:
        return Choice(t.name, t.type, found, reason, by, rule=rule, mixed=mixed)

    if request.repack is not None:
        found, why = request.repack.choose(t, rows_together(t))
        return choice(found, "repack", why)
    if (kept := _why_kept(facts, t, request)) is not None:
        beaten = f"; {rule} does not apply" if rule is not None and rule.type != t.type else ""
        return choice(t.type, "kept", f"kept: {kept}{beaten}")
    if (own := _own_option(request, t.name, rule is not None)) is not None:
        return choice(getattr(request, own), "option", option_name(own))
    if rule is not None:
        return choice(rule.type, "rule", verdict.reason)
    by_class, remark = _by_class(request, t.name)
    if by_class is not None:
        return choice(by_class, "class", remark)
    if mixture is None:
        return choice(t.type, "COPY", f"{remark}COPY")
    if request.pure:
        return choice(mixture.base, "preset", f"{remark}--pure")
    if not request.preset.mixes or not mixture.base.is_quantized:
        return choice(mixture.base, "preset", f"{remark}{request.preset}, no mixture")
    found, why = mixture.choose(t)
    return choice(found, "preset", remark + why)


def _why_kept(facts: ModelFacts, t: TensorLike, request: Request) -> str | None:
    if not presets.is_target(t.type):
        return f"{t.type} values, not weights"
    if n_dims(t.shape) < 2:
        return "a vector"
    if ROUTER in t.name and t.name.endswith("weight"):
        return None if request.ffn_gate_inp_type else "the router (--ffn-gate-inp-type changes it)"
    if t.name == "output.weight" and request.leave_output_tensor:
        return "--leave-output-tensor"
    return why_never(t.name, facts.arch, request.preset.trees == "ik")


def _own_option(request: Request, name: str, has_rule: bool) -> str | None:
    """Return the option for this particular tensor, if given."""
    if ROUTER in name:
        return "ffn_gate_inp_type"
    if name == "output.weight" and request.output_tensor_type is not None:
        return "output_tensor_type"
    if name not in TOKEN_EMBD_NAMES or request.token_embedding_type is None:
        return None
    return None if has_rule and name == "per_layer_token_embd.weight" else "token_embedding_type"


def _fallback_of(fallback: str) -> TensorType | None:
    """Return the type that --fallback names; None for "next" and "error"."""
    if fallback.lower() in ("next", "error"):
        return None
    found = type_by_name(fallback)
    if not presets.is_target(found):
        raise TypeNotSupported(f"--fallback {found}: not a type for weights")
    return found


def _fit(choice: Choice, t: TensorLike, fallback: TensorType | None) -> Choice:
    """Replace a type that does not fit the tensor's rows or shape."""
    wanted, n = choice.type, t.shape[0]
    if choice.copied:
        return choice
    if n % wanted.block:
        found = fallback or presets.next_type(wanted)
        if n % found.block:
            found = presets.next_dividing(found, n)
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
    effect; QK-W008 NVFP4 without its tensor-wide scales; QK-W009 an ik preset without its mixture;
    QK-W010 llama-quantize would ignore the rules; QK-W011 no runtime has all the types; QK-W012 --ffn-gate-type
    and --ffn-up-type differ, but experts are merged; QK-W015 one of them alone applies to merged experts.
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
    if preset.trees == "ik" and not preset.mixes and any(p.name == preset.name for p in presets.PRESETS):
        found.append(("QK-W009", f"ik_llama.cpp has a mixture for {preset}; here every tensor gets {preset.base}"))
    if any(c.by == "rule" for c in choices) and (preset.base is None or not preset.base.is_quantized):
        found.append(("QK-W010", f"llama-quantize ignores rules when TYPE is {preset}; here they apply"))
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
    return [Lint(code, message) for code, message in found]
