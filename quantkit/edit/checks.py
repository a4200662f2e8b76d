"""Whether a file with edited metadata still loads, and whether its chat templates run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quantkit.edit.changes import TEMPLATE, Change
from quantkit.errors import FormatError, RecipeError
from quantkit.extras import CHAT
from quantkit.foreign.child import Child
from quantkit.formats.gguf import Field, GGUFFile
from quantkit.pipeline.runtimes import runtimes

#: A conversation that every chat template accepts.
_CONVERSATION = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def check_kinds(changes: Sequence[Change]) -> None:
    """Raise RecipeError if a key changes its type, which no loader expects."""
    for change in changes:
        before, after = change.before, change.after
        if before is None or after is None or (before.type, before.item_type) == (after.type, after.item_type):
            continue
        raise RecipeError(
            f"{change.key}: {after.describe()} in place of {before.describe()}: loaders expect the type that the key "
            "has; --force writes it anyway",
            "QK-E123",
        )


def check_loading(model: GGUFFile, fields: Mapping[str, Field], *, is_whole: bool = True) -> None:
    """Raise RecipeError if a runtime loads a model, but not with these fields.

    Of a model of which shards are missing, any new problem is an error.
    """
    entries = [(t.name, t.type, t.shape) for t in model.tensors.values()]
    before, after = runtimes(model.fields, entries), runtimes(fields, entries)
    for old, new in zip(before, after, strict=True):
        problems = [problem for problem in new.problems if problem not in old.problems]
        if (old.loads or not is_whole) and problems:
            raise RecipeError(
                f"{model.paths[0]}: {new.name} would not load this file with these changes: {'; '.join(problems)}; "
                "--force writes it anyway",
                "QK-E305",
            )


def check_templates(path: Path, changes: Sequence[Change], tokens: Mapping[str, str]) -> list[str]:
    """Render a conversation by each new chat template; return a note if that is not possible here.

    Raises FormatError for a template that fails.
    """
    templates = [(c.key, str(c.after.value)) for c in changes if c.after is not None and _is_template(c.key)]
    if not templates:
        return []
    if CHAT.missing():
        return [f"the chat template was not tried: {CHAT.missing()[0]} is not installed"]
    for key, text in templates:
        with Child("quantkit.foreign.template:Template", f"{path}: {key}", text, dict(tokens)) as child:
            try:
                child.call("render", _CONVERSATION)
            except FormatError as e:
                raise FormatError(f"{e.message}; --force writes it anyway", e.code) from None
    return []


def _is_template(key: str) -> bool:
    return key == TEMPLATE or key.startswith(f"{TEMPLATE}.")


def token_texts(fields: Mapping[str, Field]) -> Iterator[tuple[str, str]]:
    """Yield the texts of the tokens that templates name."""
    tokens = fields.get("tokenizer.ggml.tokens")
    for name in ("bos", "eos"):
        field = fields.get(f"tokenizer.ggml.{name}_token_id")
        number = field.value if field is not None else None
        is_valid = tokens is not None and isinstance(number, int) and 0 <= number < tokens.count
        yield f"{name}_token", str(tokens.value[number]) if is_valid and tokens is not None else ""
