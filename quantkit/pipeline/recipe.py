"""Recipes: a user's own rules that give tensors their types by name.

A rule is ``regex = type``. Four dialects become the same ordered list of ``Rule``:

    -r/--recipe FILE          one rule per line (several with commas), ``#`` comments
    --tensor-type RE=T        llama.cpp, one rule
    --tensor-type-file FILE   llama.cpp, ``RE=T`` words; quantkit's recipe lines are also accepted
    --custom-q RE=T,RE=T      ik_llama.cpp, rules separated by commas

A rule matches a tensor if its regex matches anywhere in the name, in any case (``attn_q`` matches blk.0.attn_q.weight;
anchor it with ^ and $). The first rule that matches a tensor decides, so exceptions come first.

Rules for separate experts (``ffn_(up|gate)_exps``) also apply to merged ones, ffn_gate_up_exps, if they give both
halves the same type. llama-quantize would not apply them, which a lint reports. A rule for ffn_gate_up_exps itself
takes precedence, regardless of its position.

For the tensor names of GGUF, regexes (patterns.py) are a superset of the peers' syntax, with one deliberate difference:
llama-quantize lower-cases the pattern, so its ``\\S`` means ``\\s``. quantkit keeps its meaning, which a lint reports.
The type is after the *last* ``=``, and a comma separates rules only after a type: regexes may contain both, unlike in
ik_llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.formats.experts import GATE, MERGED
from quantkit.formats.outputs import read_whole
from quantkit.names import shorten
from quantkit.patterns import Pattern
from quantkit.pipeline.facts import half_names
from quantkit.pipeline.presets import check_target
from quantkit.types import TensorType, has_type, type_by_name

#: An equal sign that a regex may contain: that of (?=...) or (?<=...).
_LOOKAROUND = re.compile(r"\(\?<?=")
_COMMENT = re.compile(r"(^|\s)#.*$")
#: Maximum size of a file of rules, and maximum number of rules; a model has some thousand tensors.
_MAX_BYTES, MAX_RULES = 4 << 20, 10_000


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule; ``origin``: its place, for messages. Raises RecipeError for an invalid regex."""

    pattern: str
    type: TensorType
    origin: str
    regex: Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "regex", Pattern(self.pattern, self.origin, ignore_case=True))

    def __str__(self) -> str:
        return f"{self.pattern} = {self.type} ({self.origin})"

    def matches(self, name: str) -> bool:
        """True if the rule matches the tensor ``name``."""
        return self.regex.search(name) is not None


@dataclass(frozen=True, slots=True)
class Lint:
    """Something in a request that works, but probably not as intended."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


# --- reading the dialects ------------------------------------------------------------------------------------


def parse_rule(text: str, origin: str) -> Rule:
    """Return the rule ``regex = type``, without the spaces around both parts. Raises RecipeError."""
    pattern, equals, type_name = text.rpartition("=")
    pattern, rule = pattern.strip(), shorten(repr(text.strip()), 200)
    if not equals:
        raise RecipeError(f"{origin}: {rule} is not a rule; write regex = type", "QK-E204")
    if not pattern:
        raise RecipeError(f"{origin}: {rule} has no regex before the =; use .* for all tensors", "QK-E204")
    if "=" in _LOOKAROUND.sub("", pattern):
        wrong = shorten(repr(pattern.rpartition("=")[2].split(",")[0].strip()), 100)
        raise RecipeError(f"{origin}: {wrong} in {rule} is not a tensor type (no tensor name contains a =)", "QK-E204")
    return Rule(pattern, _rule_type(type_name, origin), origin)


def _rule_type(name: str, origin: str) -> TensorType:
    if not name.strip():
        raise RecipeError(f"{origin}: no type after the =", "QK-E204")
    try:
        return check_target(type_by_name(name.strip()))
    except TypeNotSupported as e:
        raise RecipeError(f"{origin}: {e.message}", e.code) from None


def _ends_with_type(item: str) -> bool:
    _, equals, name = item.rpartition("=")
    return bool(equals) and has_type(name)


def split_items(text: str) -> list[str]:
    """Split ``re=type,re=type`` at the commas that follow a type; the last item may be invalid."""
    items: list[str] = []
    pieces: list[str] = []
    for piece in text.split(","):
        pieces.append(piece)
        if _ends_with_type(piece):
            items.append(",".join(pieces))
            pieces = []
    last = ",".join(pieces)
    return [*items, last] if last.strip() else items


def parse_tensor_type(text: str, number: int = 1) -> list[Rule]:
    """Return the rule of the ``number``-th --tensor-type."""
    return [parse_rule(text, f"--tensor-type #{number}")]


def parse_custom_q(text: str, number: int = 1) -> list[Rule]:
    """Return the rules of the ``number``-th --custom-q."""
    return _parse_rules((item, f"--custom-q #{number}, rule {i}") for i, item in enumerate(split_items(text), 1))


def parse_recipe(text: str, name: str) -> list[Rule]:
    """Return the rules in the ``text`` of a recipe; ``name`` is the file's, for messages."""
    return _parse_rules((item, f"{name}:{no}") for no, line in _lines(text) for item in split_items(line))


def parse_tensor_type_file(text: str, name: str) -> list[Rule]:
    """Return the rules of a --tensor-type-file: ``RE=T`` words, or lines of a recipe."""
    return _parse_rules(
        (item, f"--tensor-type-file {name}:{no}") for no, line in _lines(text) for item in _words_or_items(line)
    )


def _words_or_items(line: str) -> list[str]:
    words = line.split()
    return words if all(map(_ends_with_type, words)) else split_items(line)


def _parse_rules(items: Iterable[tuple[str, str]]) -> list[Rule]:
    """Return the rules of texts, and their places."""
    rules: list[Rule] = []
    for text, origin in items:
        if len(rules) == MAX_RULES:
            raise RecipeError(f"{origin}: more than {MAX_RULES} rules; combine rules for several tensors", "QK-E204")
        rules.append(parse_rule(text, origin))
    return rules


def read_recipe(path: Path) -> list[Rule]:
    """Return the rules of the recipe file ``path``. Raises RecipeError if it cannot be read."""
    return parse_recipe(_read(path), path.name)


def read_tensor_type_file(path: Path) -> list[Rule]:
    """Return the rules of the --tensor-type-file ``path``. Raises RecipeError if it cannot be read."""
    return parse_tensor_type_file(_read(path), path.name)


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for no, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        content = _COMMENT.sub("", line).strip()
        if content:
            yield no, content


def _read(path: Path) -> str:
    try:
        return read_whole(path, _MAX_BYTES).decode()
    except FormatError as e:
        raise RecipeError(e.message, e.code) from None
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path} is not a text file (byte {e.start} is not UTF-8)", "QK-E121") from None


# --- applying and checking -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The rules that apply to one tensor.

    ``rule`` decides and ``direct`` is the first to match the name, or None. For merged experts, ``gate`` and ``up`` are
    the rules for the separate halves, unless ``direct`` is for merged experts only.
    """

    rule: Rule | None
    direct: Rule | None
    gate: Rule | None = None
    up: Rule | None = None

    @property
    def via_halves(self) -> bool:
        """True if the rules for both halves decide the type of the whole."""
        return self.rule is not self.direct

    @property
    def halves(self) -> tuple[Rule, ...]:
        """The rules for the halves, without None and duplicates."""
        rules = {id(rule): rule for rule in (self.gate, self.up) if rule is not None}
        return tuple(rules.values())

    @property
    def reason(self) -> str:
        """The reason for the tensor's type."""
        if not self.via_halves:
            return f"rule {self.rule}"
        return f"rule {' and '.join(map(str, self.halves))}, which covers both halves"


def abbreviate(names: Sequence[str]) -> str:
    """Return the first name and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def first_match(rules: Sequence[Rule], name: str) -> Rule | None:
    """Return the first rule that matches the tensor ``name``, or None."""
    return next((rule for rule in rules if rule.matches(name)), None)


def decide(rules: Sequence[Rule], name: str) -> Verdict:
    """Return the verdict of ``rules`` about the tensor ``name``: the first that matches decides.

    For merged experts, the rules that would match separate gate and up tensors decide instead if both give the same
    type, unless a rule matches the merged name and neither of the separate ones.
    """
    direct, halves = first_match(rules, name), half_names(name)
    if halves is None or (direct is not None and not any(map(direct.matches, halves))):
        return Verdict(direct, direct)
    gate, up = (first_match(rules, half) for half in halves)
    agree = gate is not None and up is not None and gate.type is up.type
    direct_agrees = direct is not None and gate is not None and direct.type is gate.type
    return Verdict(gate if agree and not direct_agrees else direct, direct, gate, up)


def lint_rules(rules: Sequence[Rule], names: Sequence[str]) -> list[Lint]:
    """Return warnings about ``rules`` for a model with tensors ``names``, in the order of the rules.

    QK-W001 matches nothing; QK-W002 other rules take precedence for all its tensors; QK-W003 meant for output.weight,
    but also matches attn_output.weight; QK-W004 matches only one half of merged experts; QK-W005 llama-quantize reads
    the pattern differently; QK-W013 the halves of merged experts would get different types; QK-W014 rules for the
    halves apply to merged experts.
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
    """Return the deciding rules by name; halves of merged experts that rules match have their own entries."""
    owners: dict[str, tuple[Rule, ...]] = {}
    for name, verdict in verdicts.items():
        if verdict.via_halves:
            owners[name] = verdict.halves
        else:
            owners[name] = () if verdict.rule is None else (verdict.rule,)
        for half, rule in zip(half_names(name) or (), (verdict.gate, verdict.up), strict=False):
            if rule is not None:
                owners[half] = (rule,)
    return owners


def _lint_hits(rule: Rule, hits: list[str], owners: Mapping[str, tuple[Rule, ...]]) -> list[Lint]:
    if not hits:
        separate = any(rule.matches(name.replace(GATE, MERGED)) for name in owners if GATE in name)
        hint = "; this model has separate up and gate experts: write ffn_(gate|up)_exps" if separate else ""
        return [Lint("QK-W001", f"{rule} matches no tensor{hint}")]
    deciding = [owner for name in hits for owner in owners[name]]
    if all(owner is not rule for owner in deciding):
        rule_names = "; ".join(dict.fromkeys(map(str, deciding)))
        return [Lint("QK-W002", f"{rule} has no effect: other rules take precedence for all its tensors: {rule_names}")]
    attn = [name for name in hits if _matches_suffix_only(rule, name)]
    if "output.weight" in hits and attn:
        return [Lint("QK-W003", f"{rule} matches output.weight, but also {len(attn)} attn_output.weight; "
                                f"write ^output\\.weight$ to match only the former")]  # fmt: skip
    return []


def _matches_suffix_only(rule: Rule, name: str) -> bool:
    """True if ``name`` is an attn_output.weight and the rule matches only its output.weight part."""
    match = rule.regex.search(name)
    return match is not None and name.endswith("attn_output.weight") and match.start() >= name.index("output.weight")


def _lint_merged(verdicts: Mapping[str, Verdict]) -> dict[int, list[Lint]]:
    """Return, by the id of the first rule, the lints about merged experts whose halves rules match."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name, v in verdicts.items():
        if v.via_halves or len({half and half.type for half in (v.gate, v.up)}) > 1:
            groups.setdefault((id(v.rule), id(v.gate), id(v.up)), []).append(name)
    lints: dict[int, list[Lint]] = {}
    for names in groups.values():
        verdict = verdicts[names[0]]
        lints.setdefault(id(verdict.halves[0]), []).append(_merged_lint(verdict, f"merged {abbreviate(names)}"))
    return lints


def _merged_lint(verdict: Verdict, subject: str) -> Lint:
    """Return the lint about one kind of merged experts."""
    both = " and ".join(map(str, verdict.halves))
    if verdict.via_halves:
        verb = "apply" if len(verdict.halves) > 1 else "applies"
        return Lint("QK-W014", f"{both} {verb} to {subject}, since both halves match; in llama-quantize they would not")
    one = len(verdict.halves) == 1
    effect = "it has no effect" if one else "neither has an effect"
    if verdict.rule is not None:
        effect = f"{verdict.rule} applies to both halves"
    remedy = f"{effect}; write a rule for ffn_gate_up_exps"
    if not one:
        return Lint("QK-W013", f"{both} give gate and up different types, but {subject} can have only one: {remedy}")
    half, missing_half = ("gate", "up") if verdict.up is None else ("up", "gate")
    return Lint(
        "QK-W004", f"{both} matches the {half} half of {subject}, but no rule matches the {missing_half} half: {remedy}"
    )


def _lint_case(rule: Rule) -> list[Lint]:
    if not rule.origin.startswith("--tensor-type"):
        return []
    classes = re.findall(r"(?<!\\)(?:\\\\)*(\\[SDWB])", rule.pattern)
    if not classes:
        return []
    return [
        Lint("QK-W005", f"{rule}: llama-quantize lower-cases {classes[0]} to {classes[0].lower()}, quantkit does not")
    ]
