"""Recipes of four dialects as rules: which one a text is, reading it, and the type each program gives a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.outputs import read_whole
from quantkit.pipeline.recipe import Rule, decide, parse_recipe, parse_tensor_type_file
from quantkit.recipes.portable import READERS, check_reads
from quantkit.types import TensorType

#: The most a file may hold: names of tensors are some thousands, and each is tried with each rule.
_MOST_BYTES, _MOST_RULES = 16 << 20, 20_000
DIALECTS = tuple(READERS)
#: A shell variable that holds rules, as cooks publish them.
_BLOCK = re.compile(r"""^[ \t]*(?:export[ \t]+)?(\w*custom\w*)=(["'])(.*?)(?<!\\)\2""", re.MULTILINE | re.DOTALL | re.I)
#: What the shell would put something else for, within double quotes.
_EXPANDED = re.compile(r"`|\$[\w({@*#?$!-]")


@dataclass(frozen=True)
class Recipe:
    """Rules of a file, in the dialect it is in, and its comments without their sign."""

    name: str
    dialect: str
    rules: tuple[Rule, ...]
    comments: tuple[str, ...] = ()

    def types(self, names: Iterable[str]) -> dict[str, TensorType | None]:
        """Return the type the program of the dialect gives each tensor, None where no rule matches."""
        return resolve(self.rules, names, self.dialect)


def resolve(rules: Sequence[Rule], names: Iterable[str], dialect: str) -> dict[str, TensorType | None]:
    """Return the types by name as the program of ``dialect`` finds them: by the first rule that matches.

    Ours also lets rules for both halves of merged experts decide. RecipeError for a rule the program does not read.
    """
    if dialect == "ours":
        verdicts = {name: decide(rules, name).rule for name in names}
        return {name: None if rule is None else rule.type for name, rule in verdicts.items()}
    theirs = [(check_reads(rule.pattern, dialect, rule.origin), rule.type) for rule in rules]
    return {name: next((t for regex, t in theirs if regex.matches(name)), None) for name in names}


def read_rules(path: Path, dialect: str | None = None) -> Recipe:
    """Return the recipe in the file ``path``, of ``dialect`` or the one it looks like. Raises RecipeError."""
    try:
        text = read_whole(path, _MOST_BYTES).decode()
    except FormatError as e:
        raise RecipeError(e.message) from None
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path} is no recipe: it is not a text file (byte {e.start} is not UTF-8)") from None
    return parse_rules(text, path.name, dialect)


def parse_rules(text: str, name: str, dialect: str | None = None) -> Recipe:
    """Return the recipe in a text; ``name`` is its file's, for messages. Raises RecipeError."""
    if dialect not in (None, *DIALECTS):
        raise RecipeError(f"there is no dialect {dialect!r} of recipes: write {', '.join(DIALECTS)}")
    if "\0" in text:
        raise RecipeError(f"{name} is no recipe: it is not a text file")
    script = _block(text, name) if dialect in (None, "ik") else None
    found = dialect or ("ik" if script is not None else dialect_of(text))
    lines = text if script is None else script
    if lines.count("\n") > 50 * _MOST_RULES:
        raise RecipeError(f"{name} has {lines.count(chr(10))} lines; a recipe has some hundreds")
    if sum(line.count("=") for line in lines.splitlines() if not line.lstrip().startswith("#")) > _MOST_RULES:
        raise RecipeError(f"{name} has more than {_MOST_RULES} rules; a model has some thousand tensors")
    parse = parse_tensor_type_file if found == "llama.cpp" else parse_recipe
    comments = [line.strip().lstrip("#").strip() for line in lines.splitlines() if line.strip().startswith("#")]
    return Recipe(name, found, tuple(parse(lines, name)), tuple(comments))


def dialect_of(text: str) -> str:
    """Return the dialect that a text looks like; all take the first rule that matches."""
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


def _block(text: str, name: str) -> str | None:
    """Return the rules in a shell script's custom="...", with as many lines before; None if there is none."""
    found = [block for block in _BLOCK.finditer(text) if "=" in block[3]]
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(block[1] for block in found)
        raise RecipeError(f"{name} gives rules more than once ({names}): cut out those you mean")
    rules, quote = found[0][3], found[0][2]
    if quote == '"':
        if odd := _EXPANDED.search(re.sub(r"\\[$`]", "", rules)):
            raise RecipeError(
                f"{name}: the shell would replace {odd[0]!r} in {found[0][1]}: write out what it stands for"
            )
        rules = re.sub(r'\\(["\\$`])', r"\1", rules.replace("\\\n", ""))
    return "\n" * text.count("\n", 0, found[0].start(3)) + rules


def spelled(pattern: str, t: TensorType, dialect: str) -> str:
    """Return a rule as one line of a dialect."""
    name = t.name.lower() if dialect == "llama.cpp" else t.ggml_name
    return f"{pattern} = {name}" if dialect == "ours" else f"{pattern}={name}"


def text_of(rules: Sequence[tuple[str, TensorType]], comments: Sequence[str], dialect: str) -> str:
    """Return the text of a file of rules: what goes wherever the dialect's program, or the shell before it, expects it.

    llama.cpp's files have no comments. ik's are lines for ``--custom-q "$(grep -v '^#' FILE | paste -sd,)"``.
    """
    lines = [] if dialect == "llama.cpp" else [f"# {' '.join(line.split())}".rstrip() for line in comments]
    return "\n".join([*lines, *(spelled(pattern, t, dialect) for pattern, t in rules)]) + "\n"


def tree_of(dialect: str) -> str | None:
    """Return whose types a dialect has; None for all."""
    return {"llama.cpp": "mainline", "ik": "ik", "thireus": "ik"}.get(dialect)


def check_same(
    wanted: Mapping[str, TensorType | None], rules: Sequence[tuple[str, TensorType]], dialect: str
) -> dict[str, tuple[TensorType | None, TensorType | None]]:
    """Return the tensors that rules give another type than wanted, in a dialect: wanted and given."""
    made = [Rule(pattern, t, f"rule {i}") for i, (pattern, t) in enumerate(rules, 1)]
    given = resolve(made, wanted, dialect)
    return {name: (t, given[name]) for name, t in wanted.items() if given[name] is not t}
