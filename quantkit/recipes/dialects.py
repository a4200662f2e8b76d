"""Recipes in four dialects: detection, parsing, writing, and the types that the program of each gives tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.outputs import read_whole
from quantkit.formats.remote import locate
from quantkit.pipeline.recipe import Rule, decide, parse_tensor_type_file
from quantkit.pipeline.recipe import parse_recipe as parse_lines
from quantkit.recipes.portable import READERS, compile_pattern
from quantkit.types import TensorType

#: Limits of a file: a model has some thousand tensors, and each is matched against each rule.
_MAX_BYTES, _MAX_RULES = 16 << 20, 20_000
DIALECTS = tuple(READERS)
#: A shell variable with rules, as in published scripts.
_BLOCK = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?((?=\w*custom)\w++)=(["'])(.*?)(?<!\\)\2""", re.MULTILINE | re.DOTALL | re.I
)
#: Expansions that the shell does within double quotes.
_EXPANDED = re.compile(r"`|\$[\w({@*#?$!-]")


@dataclass(frozen=True)
class Recipe:
    """Rules of a file in its dialect, and its comments without #."""

    name: str
    dialect: str
    rules: tuple[Rule, ...]
    comments: tuple[str, ...] = ()

    def types(self, names: Iterable[str]) -> dict[str, TensorType | None]:
        """Return the type that the program of the dialect gives each tensor; None: no rule matches."""
        return resolve(self.rules, names, self.dialect)


def resolve(rules: Sequence[Rule], names: Iterable[str], dialect: str) -> dict[str, TensorType | None]:
    """Return types by name as the program of ``dialect`` does: of the first rule that matches.

    In quantkit, rules for both halves of merged experts also match. Raises RecipeError for a rule that the program
    cannot read.
    """
    if dialect == "ours":
        verdicts = {name: decide(rules, name).rule for name in names}
        return {name: None if rule is None else rule.type for name, rule in verdicts.items()}
    patterns = [(compile_pattern(rule.pattern, dialect, rule.origin), rule.type) for rule in rules]
    return {name: next((t for regex, t in patterns if regex.matches(name)), None) for name in names}


def read_rules(path: str | Path, dialect: str | None = None) -> Recipe:
    """Return the recipe in a file; ``dialect``: None detects it. Raises RecipeError."""
    path = locate(path)
    try:
        text = read_whole(path, _MAX_BYTES).decode()
    except FormatError as e:
        raise RecipeError(e.message, e.code) from None
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path} is not a recipe: not a text file (byte {e.start} is not UTF-8)", "QK-E121") from None
    return parse_recipe(text, path.name, dialect)


@checked
def parse_recipe(text: str, name: str = "the recipe", dialect: str | None = None) -> Recipe:
    """Return the recipe in a text; ``name``: of its file, for messages. Raises RecipeError."""
    if dialect not in (None, *DIALECTS):
        raise RecipeError(f"unknown recipe dialect {dialect!r}: choose one of {', '.join(DIALECTS)}", "QK-E203")
    if "\0" in text:
        raise RecipeError(f"{name} is not a recipe: not a text file", "QK-E121")
    script = _script_rules(text, name) if dialect in (None, "ik") else None
    detected = dialect or ("ik" if script is not None else detect_dialect(text))
    lines = text if script is None else script
    if lines.count("\n") > 50 * _MAX_RULES:
        raise RecipeError(f"{name} has {lines.count(chr(10))} lines, too many for a recipe", "QK-E204")
    if sum(line.count("=") for line in lines.splitlines() if not line.lstrip().startswith("#")) > _MAX_RULES:
        raise RecipeError(f"{name} has more than {_MAX_RULES} rules, too many for a recipe", "QK-E204")
    parse = parse_tensor_type_file if detected == "llama.cpp" else parse_lines
    comments = [line.strip().lstrip("#").strip() for line in lines.splitlines() if line.strip().startswith("#")]
    return Recipe(name, detected, tuple(parse(lines, name)), tuple(comments))


def detect_dialect(text: str) -> str:
    """Return the dialect of a text, by its form."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    comments = [line for line in lines if line.startswith("#")]
    rules = [line for line in lines if not line.startswith("#")]
    if any(re.search(r"\s=|=\s|\s#", line) for line in rules):
        return "ours"
    if any(re.search(r"=\w+,", line) for line in rules):
        return "ik"
    if any(re.search(r"=\w+\s+\S+=", line) for line in rules):
        return "llama.cpp"
    if any(line.startswith("##") or "Tool-Suite" in line or "THIREUS" in line.upper() for line in comments):
        return "thireus"
    if rules and all(re.match(r"\^.*\$=", line) for line in rules):
        return "thireus"
    return "ours" if comments or not rules else "llama.cpp"


def _script_rules(text: str, name: str) -> str | None:
    """Return the rules in custom="..." of a shell script, after as many empty lines as precede them; None if there are
    none."""
    blocks = [block for block in _BLOCK.finditer(text) if "=" in block[3]]
    if not blocks:
        return None
    if len(blocks) > 1:
        names = ", ".join(block[1] for block in blocks)
        raise RecipeError(f"{name} defines rules more than once ({names}): copy the ones to use to a file", "QK-E204")
    rules, quote = blocks[0][3], blocks[0][2]
    if quote == '"':
        if expansion := _EXPANDED.search(re.sub(r"\\[$`]", "", rules)):
            raise RecipeError(
                f"{name}: the shell would expand {expansion[0]!r} in {blocks[0][1]}: write its value instead",
                "QK-E204",
            )
        rules = re.sub(r'\\(["\\$`])', r"\1", rules.replace("\\\n", ""))
    return "\n" * text.count("\n", 0, blocks[0].start(3)) + rules


def format_rule(pattern: str, t: TensorType, dialect: str) -> str:
    """Return a rule as one line of a dialect."""
    name = t.name.lower() if dialect == "llama.cpp" else t.ggml_name
    return f"{pattern} = {name}" if dialect == "ours" else f"{pattern}={name}"


def text_of(rules: Sequence[tuple[str, TensorType]], comments: Sequence[str], dialect: str) -> str:
    """Return the text of a file of rules in the syntax of a dialect.

    llama.cpp's files have no comments. ik's are used as ``--custom-q "$(grep -v '^#' FILE | paste -sd,)"``.
    """
    lines = [] if dialect == "llama.cpp" else [f"# {' '.join(line.split())}".rstrip() for line in comments]
    return "\n".join([*lines, *(format_rule(pattern, t, dialect) for pattern, t in rules)]) + "\n"


def tree_of(dialect: str) -> str | None:
    """Return the project whose types a dialect has, "mainline" or "ik"; None for all."""
    return {"llama.cpp": "mainline", "ik": "ik", "thireus": "ik"}.get(dialect)


def find_differences(
    expected: Mapping[str, TensorType | None], rules: Sequence[tuple[str, TensorType]], dialect: str
) -> dict[str, tuple[TensorType | None, TensorType | None]]:
    """Return the expected and the actual type of tensors that get unexpected types from rules of a dialect."""
    parsed = [Rule(pattern, t, f"rule {i}") for i, (pattern, t) in enumerate(rules, 1)]
    types = resolve(parsed, expected, dialect)
    return {name: (t, types[name]) for name, t in expected.items() if types[name] is not t}
