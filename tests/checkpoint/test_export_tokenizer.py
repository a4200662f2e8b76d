"""Exported tokenizers give the ids of quantkit's tokenizer, for every pre-tokenizer that has a counterpart."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses
from tokenizers import Tokenizer as HuggingFace

import vocabs
from quantkit.checkpoint.export.pre_tokenizers import NFC, ORIGINAL
from quantkit.checkpoint.export.tokenizer import tokenizer_files
from quantkit.checkpoint.vocab.pre_tokenizers import TEXT
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import Field, open_gguf
from quantkit.formats.tokenizer import Tokenizer
from quantkit.formats.tokenizer.pre import PRE

#: Functions of llama.cpp's that no pattern says, and vocabularies of another kind.
WITHOUT = {
    *("afmoe", "gemma4", "granite-embed-multi-311m", "granite-embed-multi-97m", "mmbert", "sarvam-moe", "superbpe"),
    *("whitespace", "tiny_aya", "cohere2moe"),
}
NAMES = sorted(PRE.keys() - WITHOUT - {""})
#: Here the original's pattern has no sense of case but for ASCII in llama.cpp, or none at all (Kimi's).
CASELESS = {"tekken", "kimi-k2"}


@cache
def texts() -> list[str]:
    samples = [TEXT]
    for text in vocabs.TEXTS:
        try:
            samples.append(text.decode())
        except UnicodeDecodeError:
            continue
    return samples


def is_compared(name: str, text: str) -> bool:
    """Return whether llama.cpp splits a text like the original tokenizer, whose pattern is exported."""
    if text is TEXT:
        return True
    marks = any(unicodedata.category(c)[0] == "M" for c in text)
    cased = any(c.isupper() and not c.isascii() for c in text) or any(unicodedata.category(c) == "Lm" for c in text)
    camel = any(a.islower() and b.isupper() for a, b in zip(text, text[1:], strict=False))
    contracted = any(text[i] == "'" and text[i - 1 : i].isalpha() for i in range(1, len(text)))
    if name in ORIGINAL and marks or name in CASELESS and (cased or camel or contracted):
        return False
    if name.startswith("deepseek-") and any(c.isspace() and not c.isascii() for c in text):
        return name not in ("deepseek-coder", "deepseek-llm")
    return name not in NFC or unicodedata.is_normalized("NFC", text)


@cache
def vocabulary() -> dict[str, Any]:
    """Return one that shows where words end, all parts of merges tokens."""
    vocabulary_fields = vocabs.telltale()
    parts = (part for merge in vocabulary_fields["merges"] for part in merge.split(" "))
    tokens = list(dict.fromkeys((*vocabulary_fields["tokens"], *parts)))
    types = np.array([vocabs.CONTROL] + [vocabs.NORMAL] * (len(tokens) - 1), np.int32)
    return {**vocabulary_fields, "tokens": tokens, "token_type": Field.of(vocabs.KEY + "token_type", types)}


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_quantkits_tokenizer(name: str, tmp_path: Path) -> None:
    path = vocabs.write_vocab(tmp_path / "x.gguf", pre=name, **vocabulary())
    with open_gguf(path, header_only=True) as file:
        tokenizer = Tokenizer.from_gguf(file)
        files, notes = tokenizer_files(file)
    peer = HuggingFace.from_str(files["tokenizer.json"].decode())
    compared = [text for text in texts() if is_compared(name, text)]
    ids = {text: tokenizer.encode(text, add_special=True, parse_special=True).tolist() for text in compared}
    assert [text for text in compared if peer.encode(text).ids != ids[text]] == []
    assert notes == []
    assert len(compared) > len(texts()) // 2


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_other_tokenizers_are_refused(name: str, tmp_path: Path) -> None:
    path = vocabs.write_vocab(tmp_path / "x.gguf", pre=name, **vocabulary())
    with (
        open_gguf(path, header_only=True) as file,
        refuses(TypeNotSupported, "QK-E305 --no-tokenizer", name),
    ):
        tokenizer_files(file)


def test_merges_of_unknown_tokens_are_dropped(tmp_path: Path) -> None:
    path = vocabs.write_vocab(tmp_path / "x.gguf", pre="gpt-2", **vocabs.telltale())
    with open_gguf(path, header_only=True) as file:
        files, (note,) = tokenizer_files(file)
    HuggingFace.from_str(files["tokenizer.json"].decode())
    assert "merges from tokenizer.json" in note


@pytest.mark.parametrize("flags", [{}, {"add_space_prefix": False, "add_eos_token": True}])
def test_pieces(flags: dict[str, bool], tmp_path: Path) -> None:
    path = vocabs.spm(tmp_path / "x.gguf", **flags)
    with open_gguf(path, header_only=True) as file:
        tokenizer = Tokenizer.from_gguf(file)
        files, _ = tokenizer_files(file)
    peer = HuggingFace.from_str(files["tokenizer.json"].decode())
    plain = [text for text in texts() if "<" not in text and "\0" not in text]
    ids = {text: tokenizer.encode(text, add_special=True).tolist() for text in plain}
    assert [text for text in plain if peer.encode(text).ids != ids[text]] == []
    assert len(plain) > 30


@pytest.mark.parametrize("flags", [{}, {"normalizer.lowercase": False}])
def test_words(flags: dict[str, bool], tmp_path: Path) -> None:
    path = vocabs.wordpiece(tmp_path / "x.gguf", **flags)
    with open_gguf(path, header_only=True) as file:
        tokenizer = Tokenizer.from_gguf(file)
        files, _ = tokenizer_files(file)
    peer = HuggingFace.from_str(files["tokenizer.json"].decode())
    latin = [text for text in texts() if "<" not in text and max(text, default="") < "\u0250"]
    plain = [text for text in latin if max(map(len, text.split()), default=0) <= 100]  # llama.cpp has no such limit
    ids = {text: tokenizer.encode(text, add_special=True).tolist() for text in plain}
    assert [text for text in plain if peer.encode(text).ids != ids[text]] == []
    assert len(plain) > 20


def test_a_normal_token_may_be_bos(tmp_path: Path) -> None:
    """It is put before them, and is nothing special within them."""
    path = vocabs.spm(tmp_path / "x.gguf", bos_token_id=300)
    with open_gguf(path, header_only=True) as file:
        tokenizer = Tokenizer.from_gguf(file)
        files, _ = tokenizer_files(file)
    peer = HuggingFace.from_str(files["tokenizer.json"].decode())
    assert peer.encode("some text").ids == tokenizer.encode("some text", add_special=True).tolist()
    assert peer.encode("some text").ids[0] == 300
    assert "bos_token" not in json.loads(files["tokenizer_config.json"])


@pytest.mark.parametrize(
    ("flags", "pair"),
    [
        ({"add_sep_token": False}, "[CLS] a [SEP] b [SEP]"),
        ({"add_sep_token": True}, "[CLS] a [SEP] [SEP] b [SEP]"),
        ({}, "[CLS] a [SEP] b"),
    ],
)
def test_separator_between_two_texts(flags: dict[str, bool], pair: str, tmp_path: Path) -> None:
    with open_gguf(vocabs.wordpiece(tmp_path / "x.gguf", **flags), header_only=True) as file:
        files, _ = tokenizer_files(file)
    template = json.loads(files["tokenizer.json"])["post_processor"]["pair"]
    ids = [(item.get("SpecialToken") or item.get("Sequence"))["id"] for item in template]
    assert " ".join(ids).replace("A", "a").replace("B", "b") == pair
