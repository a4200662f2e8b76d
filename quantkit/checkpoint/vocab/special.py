"""Special tokens, merges and chat templates of any tokenizer, as gguf-py's SpecialVocab (llama.cpp b11434) finds them.

What it gets wrong on purpose is kept: a post-processor is only looked at where texts begin and end, lists of EOS tokens
are not seen, and of a chat template in two places that of tokenizer_config.json counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Json, large_json, optional_json
from quantkit.checkpoint.keys import Keys
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_text

KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
#: Key of the id of each kind; those of other kinds are not written.
_ID_KEYS = {
    **{kind: f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "eot", "eom", "mask")},
    **{"unk": "tokenizer.ggml.unknown_token_id", "sep": "tokenizer.ggml.seperator_token_id"},
    "pad": "tokenizer.ggml.padding_token_id",
}


@dataclass
class SpecialTokens:
    """What is found: ids and whether to add a token, by kind, in the order of finding."""

    n_tokens: int | None = None
    merges: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add: dict[str, bool] = field(default_factory=dict)
    template: Any = None
    lowercase: bool | None = None
    strip_accents: bool | None = None

    def set(self, kind: str, number: object) -> None:
        """Take the id of a kind, if it has none yet and the id is one of the vocabulary."""
        if not isinstance(number, int):
            return
        if number < 0:
            raise FormatError(f"the {kind} token has the id {number}")
        if self.n_tokens is None or number < self.n_tokens:
            self.ids.setdefault(kind, int(number))

    def write(self, keys: Keys) -> None:
        """Set the keys."""
        keys.array("tokenizer.ggml.merges", self.merges)
        for kind, number in self.ids.items():
            if kind in _ID_KEYS:
                keys.u32(_ID_KEYS[kind], number)
        for kind, value in self.add.items():
            if kind in ("bos", "eos", "sep"):
                keys.flag(f"tokenizer.ggml.add_{kind}_token", value)
        write_template(keys, self.template)
        for name, flag in (("lowercase", self.lowercase), ("strip_accents", self.strip_accents)):
            if flag is not None:
                keys.flag(f"tokenizer.ggml.normalizer.{name}", flag)


def write_template(keys: Keys, template: Any) -> None:
    """Set a chat template, or a list of named ones."""
    if isinstance(template, list):
        default, names = None, []
        for choice in template:
            if not isinstance(choice, dict):
                raise FormatError(f"{keys.where}: the chat template {short(choice)} is no object")
            text, name = choice.get("template"), str(choice.get("name", ""))
            name = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
            if not name or text is None:
                continue
            if name == "default":
                default = text
            else:
                names += [] if name in names else [name]
                keys.text(f"tokenizer.chat_template.{name}", text)
        keys.array("tokenizer.chat_templates", sorted(names))
        template = default
    if template is not None:
        keys.text("tokenizer.chat_template", template)


def special_tokens(
    folder: Path, *, merges: bool = False, kinds: Sequence[str] = KINDS, n_tokens: int | None = None
) -> SpecialTokens:
    """Return what the files of a checkpoint say; ``merges``: also the merges of a BPE vocabulary."""
    found = SpecialTokens(n_tokens)
    path = folder / "tokenizer.json"
    tokenizer = large_json(path) if path.is_file() else None
    config = optional_json(folder / "tokenizer_config.json")
    kinds = list(kinds)
    added: list[Any] = []
    if tokenizer is not None:
        if merges:
            found.merges = _merges(folder / "tokenizer.json", tokenizer)
        _read_normalizer(found, tokenizer.get("normalizer"))
        added = tokenizer.get("added_tokens") or []
        if tokenizer:
            _read_post_processor(found, tokenizer, config, kinds)
    if config:
        found.template = _template(folder, config)
        _read_config(found, config, added, kinds)
    _read_ids(found, optional_json(folder / "config.json") or {}, kinds)
    if merges and not found.merges:
        found.merges = _merges_txt(folder / "merges.txt")
    return found


def _merges(path: Path, tokenizer: Json) -> list[str]:
    """Return the merges as "LEFT RIGHT"; spaces within are spelled as in byte-level BPE."""
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list) or not merges:
        return []
    if all(isinstance(merge, str) for merge in merges):
        return merges
    if not all(isinstance(m, list) and len(m) == 2 and all(isinstance(s, str) for s in m) for m in merges):
        raise FormatError(f"{path}: model.merges is no list of pairs")
    space = chr(ord(" ") + 256)
    return [f"{left.replace(' ', space)} {right.replace(' ', space)}" for left, right in merges]


def _merges_txt(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = read_text(path).decode("utf-8", "replace").split("\n")
    pairs = [line.split() for line in lines[1 if lines[0].startswith("#") else 0 :]]
    return [" ".join(pair) for pair in pairs if len(pair) == 2]


def _read_normalizer(found: SpecialTokens, normalizer: Any, depth: int = 0) -> None:
    if not isinstance(normalizer, dict) or depth > 16:
        return
    kind = normalizer.get("type")
    if kind == "Lowercase":
        found.lowercase = True
    elif kind == "StripAccents":
        found.strip_accents = True
    elif kind == "BertNormalizer":
        found.lowercase = normalizer.get("lowercase", found.lowercase)
        found.strip_accents = normalizer.get("strip_accents", found.strip_accents)
    elif kind == "Sequence":
        for each in normalizer.get("normalizers") or []:
            _read_normalizer(found, each, depth + 1)


def _read_post_processor(found: SpecialTokens, tokenizer: Json, config: Json | None, kinds: list[str]) -> None:
    """Tell from what is done after encoding which tokens are added; complete ``config`` and ``kinds`` by it."""
    reader = _PostProcessor(found, config, kinds)
    processor = tokenizer.get("post_processor")
    if isinstance(processor, dict):
        for each in processor.get("processors") or [processor]:
            if isinstance(each, dict):
                reader.read(each)


class _PostProcessor:
    """Reads post-processors; ``bos``, ``eos``, ``cls`` and ``sep`` are what tokenizer_config.json calls so."""

    def __init__(self, found: SpecialTokens, config: Json | None, kinds: list[str]) -> None:
        self.found, self.config, self.kinds = found, config, kinds
        given = config or {}
        self.bos, self.cls = given.get("bos_token"), given.get("cls_token")
        self.eos, self.sep = given.get("eos_token"), given.get("sep_token")
        if not self.bos and self.cls:
            self.bos = self._tell("bos", self.cls)
        if not self.eos and self.sep:
            self.eos = self._tell("eos", self.sep)

    def _tell(self, kind: str, token: Any) -> Any:
        if self.config:
            self.config[f"{kind}_token"] = token
        return token

    def read(self, processor: Json) -> None:
        add = self.found.add
        kind = processor.get("type")
        if kind == "ByteLevel":
            add.setdefault("bos", False)
            add.setdefault("eos", False)
        elif kind == "RobertaProcessing":
            add.update(bos=True, eos=True, sep=True)
            if not self.cls and self.config:
                self.cls = self._tell("cls", (processor.get("cls") or [self.bos])[0])
            if not self.sep and self.config:
                self.sep = self._tell("sep", (processor.get("sep") or [self.eos])[0])
        elif kind == "TemplateProcessing":
            self._template(processor.get("single") or [], processor.get("pair") or [])

    def _template(self, single: list[Any], pair: list[Any]) -> None:
        first = last = None
        if len(single) > 1:
            first, last = _id(single[0], "SpecialToken"), _id(single[-1], "SpecialToken")
            if first:
                self._first(first)
            if last:
                self._last(last)
        if pair:
            self._pair(pair, first, last)

    def _first(self, token: str) -> None:
        if not self.config:
            self.bos = token
        elif token not in (self.bos, self.cls):
            if not self.bos:
                self.bos = self._tell("bos", token)
            if not self.cls:
                self.cls = self._tell("cls", token)
        self.found.add["bos"] = token in (self.bos, self.cls)

    def _last(self, token: str) -> None:
        if not self.config:
            self.eos = token
        elif token != self.eos:
            spare = next((kind for kind in ("eot", "eom") if kind not in self.kinds), None)
            if spare is not None:
                self.kinds.append(spare)
                self._tell(spare, self.eos)
            self.eos = self._tell("eos", token)
        self.found.add["eos"] = token == self.eos

    def _pair(self, pair: list[Any], first: str | None, last: str | None) -> None:
        """Tell whether two texts are separated: A [sep] [eos] B."""
        start = 1 if first and _id(pair[0], "SpecialToken") == first else 0
        stop = len(pair) - (1 if last and _id(pair[-1], "SpecialToken") == last else 0)
        pair = pair[start:stop]
        if not pair or (_id(pair[0], "Sequence"), _id(pair[-1], "Sequence")) != ("A", "B") or len(pair) < 3:
            return
        between, separators, adds = pair[1:-1], (self.sep, self.eos), False
        token = _id(between[0], "SpecialToken")
        if token and token in separators and not last:
            adds = True
        if len(between) == 2 and (token := _id(between[1], "SpecialToken")) and token in separators:
            adds = True
        self.found.add["sep"] = adds
        if adds and not self.sep and self.config:
            self._tell("sep", self.eos)


def _id(piece: Any, kind: str) -> str | None:
    found = piece.get(kind) if isinstance(piece, dict) else None
    return found.get("id") if isinstance(found, dict) else None


def _template(folder: Path, config: Json) -> Any:
    """Return the chat template, or a list of named ones; that of tokenizer_config.json before all files."""
    other: Any = None
    if (folder / "chat_template.jinja").is_file():
        other = _text(folder / "chat_template.jinja")
        if more := sorted((folder / "additional_chat_templates").glob("*.jinja")):
            other = [{"name": "default", "template": other}]
            other += [{"name": path.stem, "template": _text(path)} for path in more]
    elif (given := optional_json(folder / "chat_template.json")) is not None:
        other = given.get("chat_template")
    found = config.get("chat_template", other)
    return found if isinstance(found, (str, list)) else None


def template_file(folder: Path) -> str:
    """Return the text of chat_template.jinja."""
    return _text(folder / "chat_template.jinja")


def _text(path: Path) -> str:
    """Return a text with its ends of lines as Python reads them."""
    try:
        return read_text(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: not UTF-8: {e}") from None


def _read_config(found: SpecialTokens, config: Json, added: list[Any], kinds: list[str]) -> None:
    for kind in kinds:
        adds = config.get(f"add_{kind}_token")
        if isinstance(adds, bool):
            found.add.setdefault(kind, adds)
        token = config.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            entries = (entry for entry in added if isinstance(entry, dict))
            found.set(kind, next((entry.get("id") for entry in entries if entry.get("content") == text), None))


def _read_ids(found: SpecialTokens, config: Json, kinds: list[str]) -> None:
    text = config.get("text_config")
    for kind in kinds:
        number = config.get(f"{kind}_token_id")
        if number is None and isinstance(text, dict):
            number = text.get(f"{kind}_token_id")
        found.set(kind, number)
