"""Changes of metadata: removals, renames and values, applied to the fields of a file in their order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.edit.values import field_of
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.gguf.rules import ALIGNMENT_KEY, PADDING_KEY, short
from quantkit.formats.outputs import read_whole
from quantkit.names import printable
from quantkit.options.edit import EditOptions
from quantkit.pipeline.provenance import is_provenance

TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_TOKENS = "tokenizer.ggml.tokens"
#: Special tokens by their names, and by the words of their keys if these differ.
TOKEN_NAMES = (
    *("bos", "eos", "eot", "eom", "unk", "sep", "pad", "mask", "cls"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_TOKEN_WORDS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
_MAX_TEMPLATE = 16 << 20


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a key; ``before`` or ``after`` is None where the key is not in the file."""

    key: str
    before: Field | None
    after: Field | None


class Editor:
    """The fields of a file, to be edited in order; an existing key keeps its place, a new one comes last."""

    def __init__(self, path: Path, fields: Mapping[str, Field]) -> None:
        self.path = path
        # Copied: the values of an open file change when its header is replaced.
        self._original = {key: replace(field, raw=bytes(field.raw)) for key, field in fields.items()}
        self.fields = dict(self._original)

    def apply(self, options: EditOptions) -> None:
        """Apply all changes.

        Raises RecipeError for one that cannot be applied, FormatError for a file that cannot be read.
        """
        if options.drop_provenance:
            for key in [key for key in self.fields if is_provenance(key) or key.startswith("quantize.imatrix.")]:
                del self.fields[key]
        for pattern in options.remove:
            self._remove(pattern)
        for key, name in options.rename.items():
            self._rename(key, name)
        for key, value in options.set.items():
            self._set(key, value)
        for name, path in options.chat_template.items():
            self._set_template(name, path)
        for name, token in options.special_token.items():
            self._set_token(name, token)
        for key, text in (
            ("tokenizer.ggml.pre", options.pre),
            ("general.name", options.name),
            ("general.license", options.license),
        ):
            if text is not None:
                self._replace(Field.of(key, text, ValueType.STRING))

    def changes(self) -> list[Change]:
        """Return the keys that differ from the file, in its order."""
        keys = dict.fromkeys((*self._original, *self.fields))
        pairs = ((key, self._original.get(key), self.fields.get(key)) for key in keys)
        return [Change(*pair) for pair in pairs if _content(pair[1]) != _content(pair[2])]

    def _check(self, key: str) -> None:
        if key.startswith("split."):
            raise RecipeError(
                f"{key}: follows from the shards; split and join files with quantkit split and quantkit join",
                "QK-E201",
            )
        if key == ALIGNMENT_KEY:
            raise RecipeError(f"{key}: the places of all tensors depend on it, so it cannot be edited", "QK-E201")
        if key == PADDING_KEY:
            raise RecipeError(f"{key}: use --reserve", "QK-E201")

    def _replace(self, field: Field) -> None:
        self._check(field.key)
        self.fields[field.key] = field

    def _set(self, key: str, value: Any) -> None:
        self._check(key)
        self.fields[key] = field_of(key, value, self.fields.get(key))

    def _remove(self, pattern: str) -> None:
        prefix = pattern.removesuffix("*")
        keys = [key for key in self.fields if (key.startswith(prefix) if pattern.endswith("*") else key == pattern)]
        if not keys:
            raise RecipeError(f"--remove {pattern}: {printable(str(self.path))} has no such key", "QK-E206")
        for key in keys:
            self._check(key)
            del self.fields[key]

    def _rename(self, key: str, name: str) -> None:
        self._check(key)
        self._check(name)
        if key not in self.fields:
            raise RecipeError(f"--rename {key}: {printable(str(self.path))} has no such key", "QK-E206")
        if name in self.fields:
            raise RecipeError(f"--rename {key}={name}: the file has {name}; remove it first", "QK-E201")
        self.fields = {
            (name if k == key else k): (replace(field, key=name) if k == key else field)
            for k, field in self.fields.items()
        }

    def _set_template(self, name: str, path: Path) -> None:
        for inner, text in read_templates(path).items():
            self._replace(Field.of(template_key(name or inner), text, ValueType.STRING))
        prefix = f"{TEMPLATE}."
        names = sorted(key.removeprefix(prefix) for key in self.fields if key.startswith(prefix))
        if names:
            self._replace(Field.of(TEMPLATES, names, ValueType.ARRAY, ValueType.STRING))

    def _set_token(self, name: str, token: str | int) -> None:
        tokens = self.fields.get(_TOKENS)
        if tokens is None or tokens.item_type is not ValueType.STRING:
            raise RecipeError(f"--special-token {name}: the file has no vocabulary ({_TOKENS})", "QK-E201")
        if name not in TOKEN_NAMES:
            raise RecipeError(f"--special-token {name}: choose one of {', '.join(TOKEN_NAMES)}", "QK-E203")
        number = self._token_id(name, token, tokens)
        self._replace(Field.of(f"tokenizer.ggml.{_TOKEN_WORDS.get(name, name)}_token_id", number, ValueType.UINT32))

    def _token_id(self, name: str, token: str | int, tokens: Field) -> int:
        if isinstance(token, int):
            if not 0 <= token < tokens.count:
                raise RecipeError(
                    f"--special-token {name}={token}: the vocabulary has the ids 0 to {tokens.count - 1}", "QK-E203"
                )
            return token
        ids = [i for i, text in enumerate(tokens.value) if text == token]
        if not ids:
            raise RecipeError(
                f"--special-token {name}: the vocabulary has no token {short(token)}; quote it for the shell, or give "
                "its id",
                "QK-E206",
            )
        return ids[0]


def template_key(name: str) -> str:
    """Return the key of a chat template by name; "" and "default" are the default one."""
    return TEMPLATE if name in ("", "default") else f"{TEMPLATE}.{name}"


def read_templates(path: Path) -> dict[str, str]:
    """Return the chat templates of a file by name, "" for the default one.

    A Jinja file has one; JSON (tokenizer_config.json, chat_template.json) has one or a list under chat_template.
    Raises FormatError.
    """
    try:
        text = read_whole(path, _MAX_TEMPLATE).decode()
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: not a text file (byte {e.start} is not UTF-8)", "QK-E121") from None
    if path.suffix != ".json":
        return {"": text}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: not JSON: {e}", "QK-E111") from None
    templates = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(templates, str):
        return {"": templates}
    if isinstance(templates, list) and templates and all(isinstance(t, dict) for t in templates):
        pairs = [(t.get("name"), t.get("template")) for t in templates]
        if all(isinstance(name, str) and isinstance(template, str) for name, template in pairs):
            return {"" if name == "default" else str(name): str(template) for name, template in pairs}
    raise FormatError(f"{path}: has no chat_template that is a text or a list of named ones", "QK-E111")


def _content(field: Field | None) -> tuple[object, ...] | None:
    return None if field is None else (field.type, field.item_type, field.raw)
