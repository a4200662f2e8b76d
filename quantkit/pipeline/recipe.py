"""Recipes: rules of a user's own that give tensors their types by name.

A rule is ``regex = type``. All four dialects below become the same ordered list of ``Rule``:

    -r/--recipe FILE          one rule a line (several with commas), ``#`` comments
    --tensor-type RE=T        llama.cpp, one rule
    --tensor-type-file FILE   llama.cpp, ``RE=T`` words; our recipe lines are understood too
    --custom-q RE=T,RE=T      ik_llama.cpp, rules separated by commas

A rule takes a tensor if its regex is found anywhere in the name (``attn_q`` takes blk.0.attn_q.weight; anchor
with ^ and $ for less), in any case. The first rule that takes a tensor decides, so exceptions come first.

Rules for separate experts (``ffn_(up|gate)_exps``) hold for merged ones, ffn_gate_up_exps, too: what they say of both
halves, if it is one type, they say of the whole. llama-quantize would pass such a rule over, so a lint says so. A rule
for ffn_gate_up_exps itself comes before them, wherever it stands.

Regexes are Python's, plus the classes [:alpha:] and so on that C++ knows; for the tensor names of GGUF that is
a superset of what the peers accept, with one deliberate difference: llama-quantize lower-cases the pattern, so
its ``\\S`` means ``\\s``. Here it keeps its meaning, and a lint says so. The type stands behind the *last* ``=``, and a
comma separates rules only behind a type: regexes may contain both, which ik's parser cannot take.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.pipeline.facts import GATE, MERGED, half_names
from quantkit.pipeline.presets import is_target
from quantkit.types import TensorType, type_by_name

_POSIX_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s",
    "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9a-fA-F", "blank": " \t", "w": r"\w", "d": r"\d", "s": r"\s",
}  # fmt: skip

#: An equal sign that a regex may hold: that of (?=...) or (?<=...).
_LOOKAROUND = re.compile(r"\(\?<?=")
_COMMENT = re.compile(r"(^|\s)#.*$")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; ``origin`` says where it stands, for messages. Raises RecipeError for a broken regex."""

    pattern: str
    type: TensorType
    origin: str
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "regex", _compile(self.pattern, self.origin))

    def __str__(self) -> str:
        return f"{self.pattern} = {self.type} ({self.origin})"

    def matches(self, name: str) -> bool:
        """True if the rule takes the tensor ``name``, were it the only one."""
        return self.regex.search(name) is not None


@dataclass(frozen=True, slots=True)
class Lint:
    """Something in a request that works, but hardly as it was meant."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def _compile(pattern: str, origin: str) -> re.Pattern[str]:
    python = re.sub(r"\[:(\w+):\]", lambda m: _POSIX_CLASSES.get(m[1].lower(), m[0]), pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(python, re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as e:
        raise RecipeError(f"{origin}: {pattern!r} is no regular expression: {e}") from None


# --- reading the dialects ------------------------------------------------------------------------------------


def parse_rule(text: str, origin: str) -> Rule:
    """Return the rule ``regex = type``; spaces around both parts are dropped. Raises RecipeError."""
    pattern, equals, type_name = text.rpartition("=")
    pattern = pattern.strip()
    if not equals:
        raise RecipeError(f"{origin}: {text.strip()!r} is no rule; write regex = type")
    if not pattern:
        raise RecipeError(f"{origin}: {text.strip()!r} has no regex before the =; use .* for all tensors")
    if "=" in _LOOKAROUND.sub("", pattern):
        wrong = pattern.rpartition("=")[2].split(",")[0].strip()
        raise RecipeError(f"{origin}: {wrong!r} in {text.strip()!r} is no tensor type (no tensor's name holds a =)")
    return Rule(pattern, _rule_type(type_name, origin), origin)


def _rule_type(name: str, origin: str) -> TensorType:
    if not name.strip():
        raise RecipeError(f"{origin}: there is no type behind the =")
    try:
        t = type_by_name(name)
    except TypeNotSupported as e:
        raise RecipeError(f"{origin}: {e.message}") from None
    if not is_target(t):
        raise RecipeError(f"{origin}: {t.name} is no type for weights; `quantkit types` lists those that are")
    return t


def _ends_with_type(item: str) -> bool:
    try:
        type_by_name(item.rpartition("=")[2])
    except TypeNotSupported:
        return False
    return "=" in item


def split_items(text: str) -> list[str]:
    """Split ``re=type,re=type`` at the commas that stand behind a type; the last item may be broken."""
    items: list[str] = []
    held = ""
    for piece in text.split(","):
        held = f"{held},{piece}" if held else piece
        if _ends_with_type(held):
            items.append(held)
            held = ""
    return [*items, held] if held.strip() else items


def parse_tensor_type(text: str, number: int = 1) -> list[Rule]:
    """Return the rule of the ``number``-th --tensor-type."""
    return [parse_rule(text, f"--tensor-type #{number}")]


def parse_custom_q(text: str, number: int = 1) -> list[Rule]:
    """Return the rules of the ``number``-th --custom-q."""
    return [parse_rule(item, f"--custom-q #{number}, rule {i}") for i, item in enumerate(split_items(text), 1)]


def parse_recipe(text: str, name: str) -> list[Rule]:
    """Return the rules of a recipe's ``text``; ``name`` is the file's, for messages."""
    return [rule for no, line in _lines(text) for rule in _line_rules(line, f"{name}:{no}")]


def parse_tensor_type_file(text: str, name: str) -> list[Rule]:
    """Return the rules of a --tensor-type-file: ``RE=T`` words, or lines of a recipe."""
    rules: list[Rule] = []
    for no, line in _lines(text):
        origin = f"--tensor-type-file {name}:{no}"
        words = line.split()
        if all(_ends_with_type(word) for word in words):
            rules += [parse_rule(word, origin) for word in words]
        else:
            rules += _line_rules(line, origin)
    return rules


def read_recipe(path: Path) -> list[Rule]:
    """Return the rules of the recipe file ``path``; raise RecipeError if it cannot be read."""
    return parse_recipe(_read(path), path.name)


def read_tensor_type_file(path: Path) -> list[Rule]:
    """Return the rules of the --tensor-type-file ``path``; raise RecipeError if it cannot be read."""
    return parse_tensor_type_file(_read(path), path.name)


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for no, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        bare = _COMMENT.sub("", line).strip()
        if bare:
            yield no, bare


def _line_rules(line: str, origin: str) -> list[Rule]:
    return [parse_rule(item, origin) for item in split_items(line)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise RecipeError(f"cannot read the rules in {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path} is no text file (byte {e.start} is not UTF-8)") from None


# --- applying and checking -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a list of rules says of one tensor.

    ``rule`` decides and ``direct`` takes the name; None if none does. Of merged experts ``gate`` and ``up`` would
    decide about the separate halves, unless ``direct`` speaks of merged experts alone.
    """

    rule: Rule | None
    direct: Rule | None
    gate: Rule | None = None
    up: Rule | None = None

    @property
    def through(self) -> bool:
        """True if the rules of both halves decide about the whole."""
        return self.rule is not self.direct

    @property
    def halves(self) -> tuple[Rule, ...]:
        """The rules of the halves, without None and without doubles."""
        rules = {id(rule): rule for rule in (self.gate, self.up) if rule is not None}
        return tuple(rules.values())

    @property
    def reason(self) -> str:
        """Why the tensor has its type."""
        if not self.through:
            return f"rule {self.rule}"
        return f"rule {' and '.join(map(str, self.halves))}, by the names of both halves"


def first_match(rules: Sequence[Rule], name: str) -> Rule | None:
    """Return the first rule that takes the tensor ``name``, or None."""
    return next((rule for rule in rules if rule.matches(name)), None)


def decide(rules: Sequence[Rule], name: str) -> Verdict:
    """Return what ``rules`` say of the tensor ``name``: the first that takes it decides.

    Of merged experts, the rules that would take gate and up were they separate decide instead where both give one
    type, unless a rule takes the merged name and neither of theirs.
    """
    direct, halves = first_match(rules, name), half_names(name)
    if halves is None or (direct is not None and not any(map(direct.matches, halves))):
        return Verdict(direct, direct)
    gate, up = (first_match(rules, half) for half in halves)
    agree = gate is not None and up is not None and gate.type is up.type
    same = direct is not None and gate is not None and direct.type is gate.type
    return Verdict(gate if agree and not same else direct, direct, gate, up)


def lint_rules(rules: Sequence[Rule], names: Sequence[str]) -> list[Lint]:
    """Return what looks wrong with ``rules`` for a model whose tensors are ``names``, in the order of the rules.

    QK-W001 matches nothing; QK-W002 every tensor it matches is taken by earlier rules; QK-W003 meant for
    output.weight, hits attn_output.weight too; QK-W004 takes one half of merged experts only; QK-W005 llama-quantize
    would read the pattern differently; QK-W013 the halves of merged experts would get different types; QK-W014 rules
    for the halves decide about merged experts.
    """
    verdicts = {name: decide(rules, name) for name in names}
    owners = _owners(verdicts)
    merged = _lint_merged(verdicts)
    lints: list[Lint] = []
    for rule in rules:
        hits = [name for name in owners if rule.matches(name)]
        lints += _lint_hits(rule, hits, owners)
        lints += merged.pop(id(rule), [])
        lints += _lint_case(rule)
    return lints


def _owners(verdicts: Mapping[str, Verdict]) -> dict[str, tuple[Rule, ...]]:
    """Return by name which rules decide; the halves of merged experts, where rules speak of them, are names too."""
    owners: dict[str, tuple[Rule, ...]] = {}
    for name, verdict in verdicts.items():
        owners[name] = verdict.halves if verdict.through else () if verdict.rule is None else (verdict.rule,)
        for half, rule in zip(half_names(name) or (), (verdict.gate, verdict.up), strict=False):
            if rule is not None:
                owners[half] = (rule,)
    return owners


def _lint_hits(rule: Rule, hits: list[str], owners: Mapping[str, tuple[Rule, ...]]) -> list[Lint]:
    if not hits:
        separate = any(rule.matches(name.replace(GATE, MERGED)) for name in owners if GATE in name)
        hint = "; up and gate experts are separate in this file: ffn_(gate|up)_exps" if separate else ""
        return [Lint("QK-W001", f"{rule} matches no tensor{hint}")]
    others = [owner for name in hits for owner in owners[name]]
    if all(owner is not rule for owner in others):
        by = "; ".join(dict.fromkeys(map(str, others)))
        return [Lint("QK-W002", f"{rule} decides nothing: other rules take all it matches: {by}")]
    attn = [name for name in hits if _only_by_its_end(rule, name)]
    if "output.weight" in hits and attn:
        return [Lint("QK-W003", f"{rule} takes output.weight and also {len(attn)} attn_output.weight; "
                                f"write ^output\\.weight$ for the first alone")]  # fmt: skip
    return []


def _only_by_its_end(rule: Rule, name: str) -> bool:
    """True if ``name`` is an attn_output.weight of which the rule sees no more than output.weight."""
    found = rule.regex.search(name)
    return found is not None and name.endswith("attn_output.weight") and found.start() >= name.index("output.weight")


def _lint_merged(verdicts: Mapping[str, Verdict]) -> dict[int, list[Lint]]:
    """Return by the first rule's id what is to be said of merged experts whose halves rules speak of."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name, v in verdicts.items():
        if v.through or len({half and half.type for half in (v.gate, v.up)}) > 1:
            groups.setdefault((id(v.rule), id(v.gate), id(v.up)), []).append(name)
    lints: dict[int, list[Lint]] = {}
    for names in groups.values():
        verdict = verdicts[names[0]]
        what = f"the merged {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        lints.setdefault(id(verdict.halves[0]), []).append(_merged_lint(verdict, what))
    return lints


def _merged_lint(verdict: Verdict, what: str) -> Lint:
    """Say what becomes of one kind of merged experts."""
    both = " and ".join(map(str, verdict.halves))
    if verdict.through:
        verb = "decide" if len(verdict.halves) > 1 else "decides"
        return Lint("QK-W014", f"{both} {verb} about {what}, by the names of both halves; llama-quantize would not")
    one = len(verdict.halves) == 1
    instead = "it does not count" if one else "neither counts"
    if verdict.rule is not None:
        instead = f"{verdict.rule} decides about both halves"
    remedy = f"{instead}; write a rule for ffn_gate_up_exps"
    if not one:
        return Lint("QK-W013", f"{both} give gate and up different types, but {what} has one: {remedy}")
    half, other = ("gate", "up") if verdict.up is None else ("up", "gate")
    return Lint("QK-W004", f"{both} takes the {half} half of {what}, but no rule the {other} half: {remedy}")


def _lint_case(rule: Rule) -> list[Lint]:
    if not rule.origin.startswith("--tensor-type"):
        return []
    found = re.findall(r"(?<!\\)(?:\\\\)*(\\[SDWB])", rule.pattern)
    if not found:
        return []
    return [Lint("QK-W005", f"{rule}: llama-quantize reads {found[0]} as {found[0].lower()}; here it is {found[0]}")]
