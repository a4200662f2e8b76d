"""Vocabularies of every kind derived from tiny-moe's, test texts, and llama.cpp's ids for them.

    PYTHONPATH=. python tests/lib/vocabs.py DIR

writes tests/data/tokenizer/ids.json with libllama.so in DIR (llama.cpp b11434)::

    {"rows": [[CRC-32 of a text's ids, little-endian int32, for each text], ...], "vocabularies": {name: row}}

Texts with even numbers were tokenized with add_special, those with odd ones with parse_special.
"""

from __future__ import annotations

import json
import random
import re
import struct
import sys
import tempfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.formats.tokenizer.bpe import BYTE_LETTERS, LETTER_BYTES
from quantkit.formats.tokenizer.pre import PRE

DATA = Path(__file__).parents[1] / "data"
IDS = DATA / "tokenizer/ids.json"
KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)

#: Invalid UTF-8 is written with "surrogateescape".
TEXTS = [t.encode("utf-8", "surrogateescape") for t in json.loads((DATA / "tokenizer/texts.json").read_text())]
_POOLS = (
    *("abcXYZ ", "the ing", "  \n\t\r", "0123456789 ", "'stremdlvSTREMDLV ", "\u00e9\u00e4\u00df\u0301\u0308\u00fc "),
    *(
        "\u4f60\u597d\u4e16\u754c\u4e00\u3400\uf900",
        "\u0e01\u0e02\u0e07\u0e33\u0e48",
        "\U0001f999\u200d\ufe0f\U0001f44d",
    ),
    *('!?.,;:/\\"()[]{}<>|~^$+=`_-*&%#@', "\u00a0\u2003\u3000\u2028\u0085", "\u0627\u0628\u062a\u0661\u0662"),
    *("\u0410\u0411\u0412\u0433", "\uac00\ub098\u3131", "\u3072\u30ab\u30fc\u3002\u3001", "\u00bd\u00b2\u2167\u3007"),
    *("\0\x1c\x7f\u200b\ufeff\u0378", "\u2581<0xA>"),
)


def random_texts(seed: int, count: int, words: Sequence[str] = ()) -> list[bytes]:
    """Return texts that mix all kinds of characters and ``words``; a tenth are invalid UTF-8."""
    rng, texts = random.Random(seed), []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            if kind < 0.12 and words:
                parts.append(rng.choice(words))
            elif kind < 0.2:
                parts.append(
                    chr(rng.choice([rng.randrange(0x800), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
                )
            else:
                parts += rng.choices(rng.choice(_POOLS), k=rng.randint(1, 6))
        data = bytearray("".join(parts).encode())
        # After F4 a further byte could form an invalid code point, on which llama.cpp aborts.
        if rng.random() < 0.1 and not any(byte >= 0xF1 for byte in data):
            for _ in range(rng.randint(1, 3)):
                data.insert(
                    rng.randint(0, len(data)), rng.choice((0x80, 0xBF, 0xC3, 0xE2, 0xE0, 0xF0, 0xFF, 0xED, 0xF8))
                )
        texts.append(bytes(data))
    return texts


def flags(number: int) -> tuple[bool, bool]:
    """Return add_special and parse_special for a text's number."""
    return number % 2 == 0, number % 2 == 1


def crc(ids: Any) -> int:
    return zlib.crc32(np.asarray(ids, "<i4").tobytes())


# ---------------------------------------------------------------- vocabularies


def write_vocab(path: Path, source: Path = DATA / "tiny-moe-bf16.gguf", **values: Any) -> Path:
    """Write a file's metadata with other tokenizer.ggml.* values (None: without the key) and no tensors."""
    with open_gguf(source, header_only=True) as file:
        fields = {
            key: field for key, field in file.fields.items() if not key.startswith(KEY) or key[len(KEY) :] not in values
        }
        for name, value in values.items():
            if value is not None:
                key = name if name.startswith("general.") else KEY + name
                fields[key] = value if isinstance(value, Field) else Field.of(key, value)
        write_gguf(path, fields.values(), [])
    return path


def _pieces() -> list[str]:
    """Return tiny-moe's tokens that are text, spaces as U+2581."""
    with open_gguf(DATA / "tiny-moe-bf16.gguf", header_only=True) as file:
        letters = file.get(KEY + "tokens")
    pieces = []
    for token in letters:
        if all(letter in LETTER_BYTES for letter in token):
            data = bytes(LETTER_BYTES[letter] for letter in token)
            try:
                pieces.append(data.decode().replace(" ", "\u2581"))
            except UnicodeDecodeError:
                continue
    return pieces


_EXTRA = [
    "\u00e9",
    "\u4e16\u754c",
    "\u4e16",
    "\u754c",
    "\u0410\u0411",
    "\U0001f999",
    "\u2581\u2581\u2581",
    "\u3002",
    "fi",
    "\u2581<",
]


def _with_types(special: dict[str, int], pieces: list[str]) -> tuple[list[str], Field]:
    tokens = list(dict.fromkeys([*special, *pieces]))
    types = [special.get(token, NORMAL) for token in tokens]
    return tokens, Field.of(KEY + "token_type", np.array(types, np.int32))


def _byte_tokens(kind: int) -> dict[str, int]:
    return {f"<0x{byte:02X}>": kind for byte in range(256)}


def spm(path: Path, **values: Any) -> Path:
    """SentencePiece's BPE: scores fall with rank, many of them equal."""
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **_byte_tokens(BYTE), "<user>": USER, "<mask>": USER}
    tokens, types = _with_types(special, [*_pieces(), *_EXTRA])
    scores = np.array([-(i // 3) / 7 for i in range(len(tokens))], np.float32)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    defaults = {"model": "llama", "pre": None, "merges": None, "add_bos_token": None, **ids}
    return write_vocab(path, **{**defaults, "tokens": tokens, "token_type": types, "scores": scores, **values})


def wordpiece(path: Path, **values: Any) -> Path:
    """WordPiece; every fourth continuation letter is missing."""
    special = {"[PAD]": CONTROL, "[UNK]": CONTROL, "[CLS]": CONTROL, "[SEP]": CONTROL, "<mask>": USER, "<user>": USER}
    low = [piece.lower() for piece in [*_pieces(), *_EXTRA]]
    starts = [c for c in map(chr, range(33, 127)) if not c.isalpha() or ord(c) % 4]
    tokens, types = _with_types(special, [*low, *("\u2581" + c for c in starts), "\u2581e", "\u2581\u754c"])
    ids = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "eos_token_id": None, "cls_token_id": 2}
    defaults = {"model": "bert", "pre": "bert-bge", "merges": None, "scores": None, **ids}
    return write_vocab(path, **{**defaults, "tokens": tokens, "token_type": types, **values})


def unigram(path: Path, **values: Any) -> Path:
    """SentencePiece's unigram model with a map of prefixes; many scores equal."""
    special = {"<s>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN, "<user>": USER, "<mask>": USER, "\u00e9\u00e9": USER}
    tokens, types = _with_types(special, [*_pieces(), *_EXTRA])
    scores = np.array([-(len(t) * 2 + i % 7) / 3 if i > 2 else 0 for i, t in enumerate(tokens)], np.float32)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2, "add_bos_token": True}
    defaults = {"model": "t5", "pre": None, "merges": None, "add_space_prefix": True, **ids}
    defaults |= {"tokens": tokens, "token_type": types, "scores": scores, "remove_extra_whitespaces": True}
    return write_vocab(path, **{**defaults, "precompiled_charsmap": charsmap(), **values})


def rwkv(path: Path, **values: Any) -> Path:
    """RWKV: bytes and words, escaped."""
    words = [
        "the",
        " the",
        "There",
        "\\'",
        "\\\\x",
        "\\n\\n",
        "\\xe4\\xb8\\x96",
        "'s",
        "<user>",
        "  ",
        "\\t\\t",
        "\\r\\n",
    ]
    tokens = ["<|endoftext|>", *(f"\\x{byte:02x}" for byte in range(256)), *words]
    types = np.array([CONTROL] + [NORMAL] * (len(tokens) - 1), np.int32)
    defaults = {"model": "rwkv", "pre": None, "merges": None, "tokens": tokens, "unknown_token_id": None}
    return write_vocab(path, **{**defaults, "token_type": Field.of(KEY + "token_type", types), **values})


def charsmap(spaces: bool = False) -> Field:
    """Return a map of a few prefixes as a double array; with ``spaces``, one contains a space."""
    pairs = {
        "\u00a0": " ",
        "\n": " ",
        "\t": " ",
        "\ufb01": "fi",
        "\uff11": "1",
        "\uff21": "A",
        "e\u0301": "\u00e9",
        "\u0301": "",
    }
    pairs |= {"\u3000": " ", "\u2460": "(1)", "\u00bd": "1/2"} | ({" \u0301": "\u00b4"} if spaces else {})
    texts = b""
    trie: dict[int, Any] = {}
    for prefix, text in sorted(pairs.items()):
        node = trie
        for byte in prefix.encode():
            node = node.setdefault(byte, {})
        node[0] = len(texts)
        texts += text.encode() + b"\0"
    array = _double_array(trie)
    data = struct.pack("<I", 4 * len(array)) + array.astype("<u4").tobytes() + texts
    return Field.of(KEY + "precompiled_charsmap", np.frombuffer(data, np.uint8))


def _double_array(trie: dict[int, Any]) -> np.ndarray:
    array = np.zeros(1 << 14, np.uint32)
    used = {0}
    todo: list[tuple[int, dict[int, Any]]] = [(0, trie)]
    while todo:
        index, node = todo.pop()
        base = next(b for b in range(1, len(array)) if all(b ^ byte not in used and b ^ byte for byte in node))
        used |= {base ^ byte for byte in node}
        # The root's base is absolute; that of another node is relative to the node.
        array[index] |= np.uint32((base ^ index) << 10 | (0x100 if 0 in node else 0))
        for byte, child in node.items():
            if byte == 0:
                array[base] = 0x80000000 | child
            else:
                array[base ^ byte] = byte
                todo.append((base ^ byte, child))
    return array


def vocabularies(folder: Path) -> dict[str, Path]:
    """Write every vocabulary and return its path by name: BPE vocabularies have the names of their pre-tokenizers."""
    paths = {}
    # llama.cpp aborts on a space if the model is not "whitespace", too.
    for number, name in enumerate(sorted(PRE.keys() - {"whitespace"})):
        paths[f"pre {name}"] = write_vocab(folder / f"pre{number}.gguf", pre=name or None, **telltale())
    paths["tiny-moe"] = DATA / "tiny-moe-bf16.gguf"
    paths["gemma4"] = raw_bpe(folder / "raw.gguf", model="gemma4", pre=None)
    for name in ("sarvam-moe", "mmbert", "granite-embed-multi-311m"):
        paths[f"raw {name}"] = raw_bpe(folder / f"raw-{name}.gguf", pre=name)
    paths["raw whitespace"] = raw_bpe(folder / "blank.gguf", model="whitespace", pre="whitespace")
    for name, make in (("spm", spm), ("wordpiece", wordpiece), ("unigram", unigram), ("rwkv", rwkv)):
        paths[name] = make(folder / f"{name}.gguf")
    off = Field.of(KEY + "normalizer.lowercase", False)
    field = Field.of(KEY + "normalizer.strip_accents", False)
    paths["spm plain"] = spm(folder / "spm2.gguf", add_space_prefix=False, add_eos_token=True)
    paths["spm phi-3"] = spm(folder / "spm3.gguf", **{"general.name": "Phi-3 mini"})
    paths["wordpiece cased"] = wordpiece(folder / "cased.gguf", **{"normalizer.lowercase": off})
    paths["wordpiece accents"] = wordpiece(folder / "accents.gguf", **{"normalizer.strip_accents": field})
    paths["unigram spaces"] = unigram(
        folder / "unigram2.gguf", remove_extra_whitespaces=False, precompiled_charsmap=charsmap(spaces=True)
    )
    paths["unigram bare"] = unigram(folder / "unigram3.gguf", precompiled_charsmap=None, add_space_prefix=None)
    paths["lstrip"] = write_vocab(folder / "lstrip.gguf", pre="jina-v2-de", **corrected(["<mask>", "<user>"]))
    paths["corrected"] = write_vocab(folder / "corrected.gguf", **corrected(ODD_TOKENS))
    paths["harmony"] = write_vocab(folder / "harmony.gguf", pre="gpt-4o", **corrected(HARMONY))
    return paths


@cache
def telltale() -> dict[str, Any]:
    """Return a BPE vocabulary that reveals the ends of words: it merges any two adjacent bytes of TEXTS.

    Whole words are also tokens, but not reachable by merges: only a pre-tokenizer with ignore_merges finds them.
    """
    pairs, words = set(), set()
    for text in TEXTS:
        letters = text.decode("latin-1").translate(BYTE_LETTERS)
        plain = text.decode(errors="replace").replace(" ", "\u2581")
        pairs |= {a + b for kind in (letters, plain) for a, b in zip(kind, kind[1:], strict=False) if " " not in a + b}
        words |= {word for word in re.findall(r"\S{3,8}", letters.replace("\u0120", " \u0120")) if "\0" not in word}
    ordered_pairs = sorted(pair for pair in pairs if "\n" not in pair and "\0" not in pair)
    random.Random(5).shuffle(ordered_pairs)
    tokens = list(
        dict.fromkeys(["<|endoftext|>", *BYTE_LETTERS.values(), *ordered_pairs, "\u0120" * 3, *sorted(words)])
    )
    types = np.array([CONTROL] + [NORMAL] * (len(tokens) - 1), np.int32)
    merges = [f"{pair[0]} {pair[1]}" for pair in ordered_pairs] + ["\u0120\u0120 \u0120"]
    return {"tokens": tokens, "token_type": Field.of(KEY + "token_type", types), "merges": merges}


HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>", "</s>"]
ODD_TOKENS = [
    "</s>",
    "<|eot_id|>",
    "<PRE>",
    "[PAD]",
    "<|file_sep|>",
    "<|fim_middle|>",
    "<a><b>",
    "<a>",
    "<b>c",
    "  ",
    "\n\n",
    "",
]


def corrected(texts: Sequence[str]) -> dict[str, Any]:
    """Return tiny-moe's tokens with the last ones replaced: the first half normal, the second user-defined."""
    with open_gguf(DATA / "tiny-moe-bf16.gguf", header_only=True) as file:
        tokens, types = list(file.get(KEY + "tokens")), np.array(file.fields[KEY + "token_type"].array)
    fresh = [text for text in texts if text not in tokens]
    tokens[-len(fresh) :] = fresh
    types[-(len(fresh) // 2) :] = USER
    return {"tokens": tokens, "token_type": Field.of(KEY + "token_type", types.astype(np.int32))}


def raw_bpe(path: Path, **values: Any) -> Path:
    """BPE of characters with U+2581, like Gemma 4's: tiny-moe's merges as text, newlines, byte tokens."""
    special = {
        "<pad>": CONTROL,
        "</s>": CONTROL,
        "<s>": CONTROL,
        "<unk>": UNKNOWN,
        **_byte_tokens(BYTE),
        "<user>": USER,
    }
    pieces = [piece for piece in _pieces() if "\n" not in piece]
    tokens, types = _with_types(special, [*pieces, *_EXTRA, "\n", "\n\n", "\n\n\n"])
    vocabulary = set(tokens)
    merges = [
        f"{token[:split]} {token[split:]}"
        for token in tokens
        for split in range(1, len(token))
        if token not in special and "\n" not in token and {token[:split], token[split:]} <= vocabulary
    ]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    return write_vocab(path, **{**ids, "tokens": tokens, "token_type": types, "merges": merges, **values})


def main() -> None:
    from llama_tokenize import ask

    with tempfile.TemporaryDirectory() as folder:
        paths = vocabularies(Path(folder))
        questions = [(text, *flags(number)) for number, text in enumerate(TEXTS)]
        answers = ask(Path(sys.argv[1]), [(path, questions) for path in paths.values()])
    rows: dict[tuple[int, ...], int] = {}
    refused = [name for name, ids in zip(paths, answers, strict=True) if ids is None]
    if refused:
        sys.exit(f"llama.cpp refuses {refused}")
    table = {}
    for name, ids in zip(paths, answers, strict=True):
        table[name] = rows.setdefault(tuple(crc(text) for text in ids), len(rows))
    IDS.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    IDS.write_text(f'{{"rows": [\n{lines}\n],\n"vocabularies": {json.dumps(table)}}}\n')
    print(f"{IDS}: {len(table)} vocabularies, {len(rows)} different, {len(TEXTS)} texts")


if __name__ == "__main__":
    main()
