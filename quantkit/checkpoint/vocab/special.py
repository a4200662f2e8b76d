"""Special tokens, merges and chat templates of any tokenizer, found like gguf-py's SpecialVocab (llama.cpp b11434).

Its simplifications are kept: a post-processor is only evaluated for the begin and end of texts, lists of EOS tokens are
ignored, and the chat template of tokenizer_config.json takes precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Json, large_json, optional_json
from quantkit.checkpoint.keys import Keys
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_text

KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
#: Key of the id of each kind; other kinds are not written.
_ID_KEYS = {
    **{kind: f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "eot", "eom", "mask")},
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}


@dataclass
class SpecialTokens:
    """Ids of special tokens and whether to add them, by kind, in the order of discovery."""

    n_tokens: int | None = None
    folder: Path = Path()
    merges: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add: dict[str, bool] = field(default_factory=dict)
    template: Any = None
    template_file: str = "tokenizer_config.json"
    #: A file with a template that convert_hf_to_gguf.py does not read.
    ignored_file: Path | None = None
    lowercase: bool | None = None
    strip_accents: bool | None = None

    def set(self, kind: str, number: object) -> None:
        """Set the id of a kind if it has none yet and the id is in the vocabulary."""
        if not isinstance(number, int):
            return
        if number < 0:
            where = self.folder / "config.json"
            raise FormatError(
                f"{where}: {kind}_token_id is {number}: if there is no such token, write null or remove the key",
                "QK-E114",
            )
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
        write_template(keys, self.template, self.template_file)
        if self.ignored_file is not None:
            keys.omissions.append(
                f"{self.ignored_file}: chat templates are only read together with tokenizer_config.json: the GGUF "
                "file has no chat template"
            )
        for name, flag in (("lowercase", self.lowercase), ("strip_accents", self.strip_accents)):
            if flag is not None:
                keys.flag(f"tokenizer.ggml.normalizer.{name}", flag)


def write_template(keys: Keys, template: Any, file: str = "tokenizer_config.json") -> None:
    """Set a chat template, or a list of named ones; any other value is omitted with a note."""
    where = keys.where.with_name(file)
    if template is not None and not isinstance(template, (str, list)):
        keys.omissions.append(
            f"{where}: chat_template is {short(template)}, not a text: the GGUF file has no chat template"
        )
        return
    if isinstance(template, list):
        default, names = None, []
        for choice in template:
            if not isinstance(choice, dict):
                raise FormatError(
                    f"{where}: the chat template {short(choice)} is not an object with name and template", "QK-E114"
                )
            text, name = choice.get("template"), str(choice.get("name", ""))
            name = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
            if not name or text is None:
                keys.omissions.append(
                    f"{where}: ignored the chat template {short(choice)}, which has no name or no text"
                )
                continue
            if not isinstance(text, str):
                raise FormatError(f"{where}: the chat template {short(name)} is {short(text)}, not a text", "QK-E114")
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
    """Return the special tokens of a checkpoint's files; ``merges``: also the merges of a BPE vocabulary."""
    special = SpecialTokens(n_tokens, folder)
    path = folder / "tokenizer.json"
    tokenizer = large_json(path) if path.exists() else None
    config = optional_json(folder / "tokenizer_config.json")
    kinds = list(kinds)
    added: list[Any] = []
    if tokenizer is not None:
        if merges:
            special.merges = _merges(folder / "tokenizer.json", tokenizer)
        _read_normalizer(special, tokenizer.get("normalizer"))
        added = tokenizer.get("added_tokens") or []
        if tokenizer:
            _read_post_processor(special, tokenizer, config, kinds)
    if config:
        special.template, special.template_file = _template(folder, config)
        _read_config(special, config, added, kinds)
    else:
        files = (folder / name for name in ("chat_template.jinja", "chat_template.json"))
        special.ignored_file = next((file for file in files if file.exists()), None)
    _read_ids(special, optional_json(folder / "config.json") or {}, kinds)
    if merges and not special.merges:
        special.merges = _merges_txt(folder / "merges.txt")
    return special


def _merges(path: Path, tokenizer: Json) -> list[str]:
    """Return the merges as "LEFT RIGHT"; spaces within are spelled as in byte-level BPE."""
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list) or not merges:
        return []
    kinds = set(map(type, merges))
    if kinds == {str}:
        return merges
    if kinds != {list} or set(map(len, merges)) != {2} or set(map(type, chain.from_iterable(merges))) != {str}:
        raise FormatError(f"{path}: model.merges is not a list of pairs", "QK-E114")
    lines = list(map(" ".join, merges))
    if "".join(lines).count(" ") == len(lines):
        return lines
    space = chr(ord(" ") + 256)
    return [f"{left.replace(' ', space)} {right.replace(' ', space)}" for left, right in merges]


def _merges_txt(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = read_text(path).decode("utf-8", "replace").split("\n")
    pairs = [line.split() for line in lines[1 if lines[0].startswith("#") else 0 :]]
    return [" ".join(pair) for pair in pairs if len(pair) == 2]


def _read_normalizer(special: SpecialTokens, normalizer: Any, depth: int = 0) -> None:
    if not isinstance(normalizer, dict) or depth > 16:
        return
    kind = normalizer.get("type")
    if kind == "Lowercase":
        special.lowercase = True
    elif kind == "StripAccents":
        special.strip_accents = True
    elif kind == "BertNormalizer":
        special.lowercase = normalizer.get("lowercase", special.lowercase)
        special.strip_accents = normalizer.get("strip_accents", special.strip_accents)
    elif kind == "Sequence":
        for item in normalizer.get("normalizers") or []:
            _read_normalizer(special, item, depth + 1)


def _read_post_processor(special: SpecialTokens, tokenizer: Json, config: Json | None, kinds: list[str]) -> None:
    """Find the tokens that the post-processor adds; complete ``config`` and ``kinds`` by them."""
    reader = _PostProcessor(special, config, kinds)
    processor = tokenizer.get("post_processor")
    if isinstance(processor, dict):
        for item in processor.get("processors") or [processor]:
            if isinstance(item, dict):
                reader.read(item)


class _PostProcessor:
    """Reads post-processors; ``bos``, ``eos``, ``cls`` and ``sep`` come from tokenizer_config.json."""

    def __init__(self, special: SpecialTokens, config: Json | None, kinds: list[str]) -> None:
        self.special = special
        self.config = config
        self.kinds = kinds
        settings = config or {}
        self.bos, self.cls = settings.get("bos_token"), settings.get("cls_token")
        self.eos, self.sep = settings.get("eos_token"), settings.get("sep_token")
        if not self.bos and self.cls:
            self.bos = self._record_token("bos", self.cls)
        if not self.eos and self.sep:
            self.eos = self._record_token("eos", self.sep)

    def _record_token(self, kind: str, token: Any) -> Any:
        if self.config:
            self.config[f"{kind}_token"] = token
        return token

    def read(self, processor: Json) -> None:
        add = self.special.add
        kind = processor.get("type")
        if kind == "ByteLevel":
            add.setdefault("bos", False)
            add.setdefault("eos", False)
        elif kind == "RobertaProcessing":
            add.update(bos=True, eos=True, sep=True)
            if not self.cls and self.config:
                self.cls = self._record_token("cls", (processor.get("cls") or [self.bos])[0])
            if not self.sep and self.config:
                self.sep = self._record_token("sep", (processor.get("sep") or [self.eos])[0])
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
                self.bos = self._record_token("bos", token)
            if not self.cls:
                self.cls = self._record_token("cls", token)
        self.special.add["bos"] = token in (self.bos, self.cls)

    def _last(self, token: str) -> None:
        if not self.config:
            self.eos = token
        elif token != self.eos:
            spare = next((kind for kind in ("eot", "eom") if kind not in self.kinds), None)
            if spare is not None:
                self.kinds.append(spare)
                self._record_token(spare, self.eos)
            self.eos = self._record_token("eos", token)
        self.special.add["eos"] = token == self.eos

    def _pair(self, pair: list[Any], first: str | None, last: str | None) -> None:
        """Return whether two texts are separated: A [sep] [eos] B."""
        start = 1 if first and _id(pair[0], "SpecialToken") == first else 0
        stop = len(pair) - (1 if last and _id(pair[-1], "SpecialToken") == last else 0)
        pair = pair[start:stop]
        if not pair or (_id(pair[0], "Sequence"), _id(pair[-1], "Sequence")) != ("A", "B") or len(pair) < 3:
            return
        between = pair[1:-1]
        separators = (self.sep, self.eos)
        adds = False
        token = _id(between[0], "SpecialToken")
        if token and token in separators and not last:
            adds = True
        if len(between) == 2 and (token := _id(between[1], "SpecialToken")) and token in separators:
            adds = True
        self.special.add["sep"] = adds
        if adds and not self.sep and self.config:
            self._record_token("sep", self.eos)


def _id(piece: Any, kind: str) -> str | None:
    content = piece.get(kind) if isinstance(piece, dict) else None
    return content.get("id") if isinstance(content, dict) else None


def _template(folder: Path, config: Json) -> tuple[Any, str]:
    """Return the chat template, or a list of named ones, and its file; tokenizer_config.json takes precedence."""
    if "chat_template" in config:
        return config["chat_template"], "tokenizer_config.json"
    if (folder / "chat_template.jinja").exists():
        text = _text(folder / "chat_template.jinja")
        templates = [
            {"name": path.stem, "template": _text(path)}
            for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        ]
        return [{"name": "default", "template": text}, *templates] if templates else text, "chat_template.jinja"
    return (optional_json(folder / "chat_template.json") or {}).get("chat_template"), "chat_template.json"


def template_file(folder: Path) -> str:
    """Return the text of chat_template.jinja."""
    return _text(folder / "chat_template.jinja")


def _text(path: Path) -> str:
    """Return a text with line endings normalized as Python does."""
    try:
        return read_text(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: not UTF-8: {e}", "QK-E121") from None


def _read_config(special: SpecialTokens, config: Json, added: list[Any], kinds: list[str]) -> None:
    for kind in kinds:
        adds = config.get(f"add_{kind}_token")
        if isinstance(adds, bool):
            special.add.setdefault(kind, adds)
        token = config.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            entries = (entry for entry in added if isinstance(entry, dict))
            special.set(kind, next((entry.get("id") for entry in entries if entry.get("content") == text), None))


def _read_ids(special: SpecialTokens, config: Json, kinds: list[str]) -> None:
    text = config.get("text_config")
    for kind in kinds:
        number = config.get(f"{kind}_token_id")
        if number is None and isinstance(text, dict):
            number = text.get(f"{kind}_token_id")
        special.set(kind, number)
