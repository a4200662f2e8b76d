"""Checkpoints: a small Hugging Face directory of every architecture, generated from its description, without torch.

    python tests/lib/checkpoints.py OUT [NAME ...]

writes OUT/NAME. tests/data/checkpoints/NAME.json describes it (scripts/make_checkpoints.py writes it with
transformers): config.json, names and shapes of the tensors, the tokenizer's kind. The bytes depend on nothing else:
weights are raw Philox words, keyed by the tensor's name, in integer steps; vocabularies are built from merges.txt.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import itertools
import json
import math
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DESCRIPTIONS = Path(__file__).parents[1] / "data" / "checkpoints"
NAMES = tuple(sorted(path.stem for path in DESCRIPTIONS.glob("*.json")))
#: Checkpoints with towers for images and sound (tests/data/mmproj-sha256.json), draft models
#: (tests/data/draft-sha256.json), models that are adapters (tests/data/adapter-sha256.json), and towers of the only
#: width that llama.cpp's converter accepts, with a hidden layer of 32 values (tests/data/wide-sha256.json).
TOWERS, DRAFTS, ADAPTERS, WIDE = (
    tuple(sorted(path.stem for path in (DESCRIPTIONS / folder).glob("*.json")))
    for folder in ("towers", "drafts", "adapters", "wide")
)

Json = dict[str, Any]
Shape = tuple[int, ...]

#: The 24 tokens with recorded logits of transformers; pieces and bytes in every vocabulary of at least 600.
PROMPT = tuple(int(i) for i in np.array([17, 300, 45, 401, 88, 265, 512, 33, 270, 350, 99, 420] * 2) + np.arange(24))


#: Settings of config.json without a key in GGUF, and tensors, which are lost, also in the reference's files.
OMISSIONS = {
    **dict.fromkeys(("gemma-embedding", "gemma-embedding-dense"), {"layer_types"}),  # the sixth layer has no window
    "camembert": {"position_embeddings"},
    "jina-bert": {"hidden_act"},  # always GELU
    "llama-embed": {"attention.causal"},
    "neobert": {"qkv"},
    **dict.fromkeys(("nomic-bert-moe", "nomic-bert-xlm"), {"mlp.experts.bias"}),
    "glm": {"rms_norm_eps"},  # always 1e-5
    "gpt-oss": {"truncate"},  # YaRN between dimensions that are not integers
    "gpt-oss-mxfp4": {"truncate"},
    "granite-hybrid-dense": {"position_embedding_type"},  # hybrid Granite models have no rotary positions
    "mm-qwen3-asr": {"partial_rotary_factor"},  # Qwen 3 VL has no key for it
    "mellum": {"rope_parameters"},  # windowed layers use the RoPE base of the others
    "phi3": {"sliding_window"},
    "phi3-sparse": {"sliding_window"},
}


def _is_lost(note: str) -> bool:
    return "config.json: " in note and "llama.cpp" in note


def settings_in(notes: Iterable[str]) -> set[str]:
    """Return the settings in notes: the first word after the file."""
    return {note.partition("config.json: ")[2].split(" ")[0] for note in notes if _is_lost(note)}


@dataclass(frozen=True)
class Description:
    """The description of a checkpoint, written by scripts/make_checkpoints.py."""

    name: str
    config: Json
    #: Patterns of names to shapes, see expand().
    tensors: dict[str, list[int]]
    vocab: Json
    dtype: str = "bfloat16"
    #: Tensors that are always stored as float32: suffixes of names.
    f32: tuple[str, ...] = ()
    shards: int = 1
    #: The quantization scheme of the projections (tests/lib/quantized_checkpoints.py).
    quantized: Json | None = None
    #: convert_hf_to_gguf.py cannot read it; the expected output is its conversion of decode_weights().
    formula: bool = False
    #: Other files: README.md, generation_config.json, ...
    files: dict[str, Any] = field(default_factory=dict)
    #: Types of the conversion, if not all.
    outtypes: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "auto")
    #: Options that convert_hf_to_gguf.py and quantkit need.
    options: tuple[str, ...] = ()
    #: Its class of transformers, if config.json has a different one.
    model: str | None = None
    #: Major version of transformers that runs it; None: none.
    transformers: int | None = 4
    #: The checkpoint whose draft model it is (--target-model-dir), or whose adapter (--base).
    target: str | None = None
    #: Tensors in files of their own: path to patterns and shapes.
    parts: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    #: After how many values those of a tensor repeat; None: never.
    period: int | None = None

    def convert_keywords(self) -> Json:
        """Return the options of the conversion, with the names of quantkit.convert.ConvertOptions.

        The reference also writes some models that no runtime loads, and their bytes are compared.
        """
        settings: Json = {"pre": self.vocab.get("pre"), "allow_other_ids": True, "allow_incomplete": True}
        words = list(self.options)
        while words:
            name = words.pop(0).removeprefix("--").replace("-", "_")
            settings[name] = words.pop(0) if words and not words[0].startswith("--") else True
        return settings


def describe(name: str) -> Description:
    """Return the description of a checkpoint."""
    folders = {"towers": TOWERS, "drafts": DRAFTS, "adapters": ADAPTERS, "wide": WIDE}
    folder = next((folder for folder, names in folders.items() if name in names), ".")
    text: Json = json.loads((DESCRIPTIONS / folder / f"{name}.json").read_text())
    for key in {"f32", "options", "outtypes"} & text.keys():
        text[key] = tuple(text[key])
    return Description(name=name, **text)


def write_checkpoint(name: str, out: Path) -> Path:
    """Write the checkpoint ``name`` as the directory out/name and return it."""
    return write_description(describe(name), out)


def write_description(description: Description, out: Path) -> Path:
    """Write a checkpoint as the directory out/name and return it."""
    path = out / description.name
    path.mkdir(parents=True, exist_ok=True)
    is_adapter = "adapter_config.json" in description.files
    if not is_adapter:  # which has those of its base
        _write_json(path / "config.json", description.config)
    for name, content in description.files.items():
        _write_text(path / name, content)
    tokenizer = path / description.vocab.get("folder", "")
    tokenizer.mkdir(exist_ok=True)
    for name, data in vocab_files(description.vocab).items():
        (tokenizer / name).write_bytes(data)
    if not is_adapter:
        write_shards(path, list(stored_tensors(description)), description.shards)
    for file, tensors in description.parts.items():
        if file.endswith(".pt"):
            make = mask_file if file == "mask_embedding.pt" else head_file
            (path / file).write_bytes(make(description.name, tensors))
            continue
        part = replace(description, name=f"{description.name}/{file}", tensors=tensors, quantized=None)
        write_safetensors(path / file, list(stored_tensors(part)))
    return path


def mask_file(name: str, tensors: Mapping[str, list[int]]) -> bytes:
    """Return the file that torch.save writes of {"mask_token_id": number, "embedding": float32 vector}."""
    (number,), (width,) = tensors["mask_token_id"], tensors["embedding"]
    vector = draw(f"{name}/mask_embedding", "embedding", (width,)).astype("<f4")
    return _torch_file("mask_embedding", {"mask_token_id": number, "embedding": vector})


def head_file(name: str, tensors: Mapping[str, list[int]]) -> bytes:
    """Return the file that torch.save writes of Kev's head: two matrices with biases, its width, its temperature."""
    (width,), (columns,) = tensors["head_dim"], tensors["hidden_size"]
    head = {
        f"{part}.{end}": draw(f"{name}/head", f"{part}.{end}", shape).astype("<f4")
        for part in "qk"
        for end, shape in (("weight", (width, columns)), ("bias", (width,)))
    }
    return _torch_file("head", {"head": head, "head_dim": width, "temperature": 1.75})


def _torch_file(name: str, value: Json) -> bytes:
    """Return the file that torch.save writes of a dict of numbers below 256, floats, float32 arrays and such dicts."""
    storages: list[bytes] = []

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def number(value: int) -> bytes:
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    def pickled(value: Any) -> bytes:
        if isinstance(value, dict):
            return b"}(" + b"".join(text(key) + pickled(item) for key, item in value.items()) + b"u"
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, int):
            return number(value)
        storages.append(value.tobytes())
        key = text(str(len(storages) - 1))
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + number(value.size) + b"tQ"
        shape, strides = (
            b"".join(map(number, sizes)) + {1: b"\x85", 2: b"\x86"}[value.ndim]
            for sizes in (value.shape, [n // 4 for n in value.strides])
        )
        tensor = b"K\x00" + shape + strides + b"\x89ccollections\nOrderedDict\n)RtR"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + tensor

    files = {"data.pkl": b"\x80\x02" + pickled(value) + b".", "byteorder": b"little"}
    files |= {f"data/{i}": data for i, data in enumerate(storages)}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for file, data in {**files, "version": b"3\n"}.items():
            archive.writestr(zipfile.ZipInfo(f"{name}/{file}"), data)
    return out.getvalue()


def digest(path: Path) -> str:
    """Return the SHA-256 of all files of a directory and their names."""
    files = sorted((f.relative_to(path).as_posix(), f.read_bytes()) for f in path.rglob("*") if f.is_file())
    return hashlib.sha256(b"".join(hashlib.sha256(data).digest() + name.encode() for name, data in files)).hexdigest()


def decode_weights(description: Description) -> Description:
    """Return a quantized checkpoint as a plain one: with the dequantized float32 weights of its projections."""
    config = {key: value for key, value in description.config.items() if key != "quantization_config"}
    return replace(description, config=config, quantized={**(description.quantized or {}), "dequantized": True})


def stored_tensors(description: Description) -> Iterator[tuple[str, str, Shape, bytes]]:
    """Yield name, safetensors' dtype, shape and bytes of every tensor, in the order of storage."""
    if description.quantized is not None:
        from quantized_checkpoints import quantize  # a scheme of its own
    for name, shape in expand(description.tensors):
        if description.period is not None and math.prod(shape) > description.period:
            yield name, *_repeated(f"{description.name}/{name}", name, shape, description)
            continue
        x = draw(f"{description.name}/{name}", name, shape)
        if description.quantized is not None and (stored := quantize(description.quantized, name, x)) is not None:
            yield from stored
            continue
        if name.endswith(_COUNTS):
            step = 2**44 + 1 if name.endswith("multipliers") else 1
            yield name, "I64", shape, (np.arange(1, x.size + 1, dtype="<i8") * step).tobytes()
            continue
        if name.endswith("t2d"):
            yield name, "BOOL", shape, bytes(i % 2 for i in range(x.size))
            continue
        dtype = "float32" if name.endswith(description.f32 or ("\n",)) else description.dtype
        yield name, *encode(x, dtype)


def _repeated(key: str, name: str, shape: Shape, description: Description) -> tuple[str, Shape, bytes]:
    """Return safetensors' dtype, shape and bytes of a tensor whose values repeat."""
    scale, shift = _spread(name, shape)
    period = uniform(key, (description.period or 1,)) * np.float32(scale) + np.float32(shift)
    dtype, _, data = encode(period, description.dtype)
    nbytes = math.prod(shape) * (len(data) // period.size)
    return dtype, shape, (data * -(-nbytes // len(data)))[:nbytes]


#: Tensors of integers: ends of names.
_COUNTS = ("num_batches_tracked", "d2t", "layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")


def expand(tensors: Mapping[str, list[int]]) -> list[tuple[str, Shape]]:
    """Return names and shapes of patterns such as ``layers.{0-3,5}.{up|gate}``, layers in their order."""
    names = []
    for pattern, shape in tensors.items():
        parts = re.split(r"\{([^}]*)\}", pattern)
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        names += [("".join(name), tuple(shape)) for name in itertools.product(*choices)]
    return sorted(names, key=lambda item: [(int(p), "") if p.isdigit() else (-1, p) for p in item[0].split(".")])


def _numbers(text: str) -> list[str]:
    if "|" in text:
        return text.split("|")
    numbers: list[str] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers += map(str, range(int(low), int(high or low) + 1))
    return numbers


def draw(key: str, name: str, shape: Shape) -> npt.NDArray[np.float32]:
    """Return float32 weights: uniform steps in [-1, 1), scaled and shifted by the kind of tensor."""
    scale, shift = _spread(name, shape)
    return uniform(key, shape) * np.float32(scale) + np.float32(shift)


def uniform(key: str, shape: Shape) -> npt.NDArray[np.float32]:
    """Return float32 steps in [-1, 1)."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    n = int(np.prod(shape))
    words = np.random.Philox(key=seed).random_raw((n + 3) // 4).astype("<u8").view("<u2")[:n]
    steps: npt.NDArray[np.float32] = ((words.astype(np.float32) - 32767.5) / np.float32(32768)).reshape(shape)
    return steps


def _spread(name: str, shape: Shape) -> tuple[float, float]:
    """Return half the width and the middle of a tensor's values."""
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last == "A_log":
        return 1.0, 1.25
    if last == "sinks":
        return 2.0, 0.0
    if "e_score_correction" in name or "expert_bias" in name or "moe_statics" in name:
        return 0.1, 0.0
    if last.endswith("bias"):
        return 0.2, 0.0
    if len(shape) <= 1 or ("norm" in last and name.endswith("weight")):
        return 0.4, 1.0
    if "embed" in name or last in ("conv1d", "word_embeddings", "wte"):
        return 1.0, 0.0
    gain = 3.0 if last in ("gate", "router") or name.endswith("router.layer.weight") else 1.0
    gain *= 1.5 if last in ("q_proj", "k_proj", "query_key_value", "qkv_proj") else 1.0
    return gain * math.sqrt(3.0 / shape[-1]), 0.0


def encode(x: npt.NDArray[np.float32], dtype: str) -> tuple[str, Shape, bytes]:
    """Return safetensors' dtype, shape and bytes of weights in a float type, by torch's name."""
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        data = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
        return "BF16", x.shape, data.tobytes()
    if dtype == "float16":
        return "F16", x.shape, x.astype("<f2").tobytes()
    return "F32", x.shape, x.astype("<f4").tobytes()


def write_shards(path: Path, tensors: list[tuple[str, str, Shape, bytes]], shards: int) -> None:
    """Write model.safetensors, or a number of shards of about the same size and their index."""
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return
    total, groups, nbytes = sum(len(t[3]) for t in tensors), [[] for _ in range(shards)], 0  # type: ignore[var-annotated]
    for tensor in tensors:
        groups[min(shards - 1, nbytes * shards // total)].append(tensor)
        nbytes += len(tensor[3])
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_safetensors(path / file, group)
        index.update((name, file) for name, *_ in group)
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def write_safetensors(path: Path, tensors: list[tuple[str, str, Shape, bytes]]) -> None:
    header: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for *_, data in tensors:
            file.write(data)


def _write_text(path: Path, content: Any) -> None:
    """Write a text, or a JSON object; an object without a suffix in its name is a directory of texts."""
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8", newline="\n")
    elif path.suffix:
        _write_json(path, content)
    else:
        path.mkdir(exist_ok=True)
        for name, text in content.items():
            _write_text(path / name, text)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


# --- vocabularies ----------------------------------------------------------------------------------------------------


def vocab_files(vocab: Json) -> dict[str, bytes]:
    """Return the files of a tokenizer by name.

    vocab: ``kind`` (a key of _KINDS), ``special`` and ``user`` (tokens after the pieces), ``config`` (keys of
    tokenizer_config.json), and settings of the kind.
    """
    files = {name: data for name, data in _KINDS[vocab["kind"]](vocab).items() if name not in vocab.get("without", ())}
    return {
        name: data if isinstance(data, bytes) else (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()
        for name, data in files.items()
    }


def merges() -> list[tuple[str, str]]:
    """Return the 320 merges, in the letters of byte-level BPE."""
    lines = (DESCRIPTIONS / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    return [(a, b) for a, b in (line.split(" ") for line in lines)]


def _byte_letters() -> dict[int, str]:
    """Return GPT-2's letter of each byte, in the order of its vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    remainder = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(remainder)}


def _added(vocab: Json, first: int) -> list[Json]:
    """Return the added tokens in the format of tokenizer.json."""
    rows = [(text, True) for text in vocab.get("special", ())] + [(text, False) for text in vocab.get("user", ())]
    return [
        {"id": first + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": special}
        for i, (text, special) in enumerate(rows)
    ]


def _tokenizer_config(vocab: Json, added: list[Json]) -> Json:
    decoder = {str(row["id"]): {key: row[key] for key in row if key != "id"} for row in added}
    return {"added_tokens_decoder": decoder, **vocab.get("config", {})}


def _bpe_vocab() -> dict[str, int]:
    pieces = [*_byte_letters().values(), *(a + b for a, b in merges())]
    return {piece: i for i, piece in enumerate(pieces)}


def _bpe(vocab: Json) -> dict[str, Any]:
    """Byte-level BPE: tokenizer.json and tokenizer_config.json."""
    ids = _bpe_vocab()
    added = _added(vocab, len(ids))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    parts = [split, byte_level | {"use_regex": False}]
    post: Any = byte_level | {"trim_offsets": False}
    if (bos := vocab.get("starts_with")) is not None:
        start = {"SpecialToken": {"id": bos, "type_id": 0}}
        one = {"id": next(row["id"] for row in added if row["content"] == bos)}
        post = {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [one["id"]], "tokens": [bos]}},
        }
    pairs: list[Any] = [list(pair) for pair in merges()]
    model: Json = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"ignore_merges": vocab.get("ignore_merges", False), "vocab": ids}
    model["merges"] = [" ".join(pair) for pair in pairs] if vocab.get("merges") == "strings" else pairs
    tokenizer: Json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    tokenizer["pre_tokenizer"] = (
        {"type": "Sequence", "pretokenizers": parts} if vocab.get("split", True) else byte_level
    )
    tokenizer |= {"post_processor": post, "decoder": byte_level, "model": model}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(vocab, added)}


#: Llama 3's.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _texts() -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Yield pieces of text, spaces as U+2581, with the pair from which each is merged: letters first."""
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    texts = set()
    for char in ["\u2581", *map(chr, range(33, 127)), "\u00e9", "\u00df", "\u4f60", "\u0433"]:
        texts.add(char)
        yield char, None
    for a, b in merges():
        raw = [bytes(letters[c] for c in part).decode("utf-8", "replace").replace(" ", "\u2581") for part in (a, b)]
        piece = raw[0] + raw[1]
        if all(part in texts for part in raw) and piece not in texts:
            texts.add(piece)
            yield piece, (raw[0], raw[1])


def _spm_pieces(vocab: Json) -> list[tuple[str, float, int]]:
    """Return text, score and type (SentencePiece's) of every piece."""
    kinds = {"<unk>": 2} | dict.fromkeys(vocab.get("user_pieces", ()), 4) | dict.fromkeys(vocab.get("unused", ()), 5)
    first = [(text, 0.0, kinds.get(text, 3)) for text in vocab.get("first", ("<unk>", "<s>", "</s>"))]
    bytes_ = [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
    texts = [text for text, _ in _texts()]
    chars = [text for text in texts if len(text) == 1]
    merged = [text for text in texts if len(text) > 1][: vocab.get("pieces", 600) - len(first + bytes_ + chars)]
    return first + bytes_ + [(text, -float(i), 1) for i, text in enumerate(merged + chars)]


#: A map of one character, A to a, in the format of SentencePiece's trainer: a trie, and texts.
_CHARSMAP = struct.pack("<257I", 1024, 0x10000, 0xD41, 0x80000000, *(i ^ 1 for i in range(3, 256))) + b"a\0"


def _spm(vocab: Json) -> dict[str, Any]:
    """SentencePiece BPE, or ``unigram``: ``file``, tokenizer_config.json and, of ``added``, added_tokens.json."""
    pieces = _spm_pieces(vocab)
    model = b"".join(_message(1, _message(1, t.encode()) + _f32(2, s) + _varint(3, kind)) for t, s, kind in pieces)
    kind, charsmap = (1, _message(2, _CHARSMAP)) if vocab.get("unigram") else (2, b"")
    model += _message(2, _varint(3, kind) + _varint(4, len(pieces)) + _varint(35, 1))
    model += _message(3, _message(1, b"identity") + charsmap + _varint(3, 1) + _varint(4, 0) + _varint(5, 1))
    added = _added(vocab, len(pieces))
    entries: list[Json] = [{"content": text, "special": kind != 4} for text, _, kind in pieces if kind in (2, 3, 4)]
    rows = [row | {"id": [p[0] for p in pieces].index(row["content"])} for row in entries]
    config = _tokenizer_config(vocab, [*rows, *added])
    files = {vocab.get("file", "tokenizer.model"): model, "tokenizer_config.json": config}
    if vocab.get("added"):
        files["added_tokens.json"] = {text: len(pieces) + len(added) + i for i, text in enumerate(vocab["added"])}
    return files


def _message(number: int, data: bytes) -> bytes:
    """Return a length-delimited field of protocol buffers."""
    return _number(number << 3 | 2) + _number(len(data)) + data


def _varint(number: int, value: int) -> bytes:
    return _number(number << 3) + _number(value)


def _f32(number: int, value: float) -> bytes:
    return _number(number << 3 | 5) + struct.pack("<f", value)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _spm_bpe(vocab: Json) -> dict[str, Any]:
    """SentencePiece's pieces as tokenizer.json: BPE with byte fallback."""
    ids = {text: i for i, (text, *_) in enumerate(_spm_pieces(vocab))}
    special = [text for text, _, kind in _spm_pieces(vocab) if kind in (2, 3)]
    user = [text for text, _, kind in _spm_pieces(vocab) if kind == 4]
    added = [
        {"id": ids[text], "content": text, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": text in special}
        for text in special + user
    ] + _added(vocab, len(ids))
    model: Json = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": ids}
    model["merges"] = [list(pair) for text, pair in _texts() if pair is not None and text in ids]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    to_space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": space,
    }
    tokenizer |= {"pre_tokenizer": None, "post_processor": None, "decoder": decoder, "model": model}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(vocab, added)}


def _tiktoken(vocab: Json) -> dict[str, Any]:
    """Ranks of byte strings, a line each: ``file``, and tokenizer_config.json."""
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    ids = _bpe_vocab()
    lines = (base64.b64encode(bytes(letters[c] for c in text)) + b" %d\n" % i for text, i in ids.items())
    return {vocab["file"]: b"".join(lines), "tokenizer_config.json": _tokenizer_config(vocab, _added(vocab, len(ids)))}


def _tekken(vocab: Json) -> dict[str, Any]:
    """Mistral's own file: tekken.json, in which special tokens come first."""
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    merged = [bytes(letters[c] for c in a + b) for a, b in merges()]
    rows: list[Json] = []
    for token in [*(bytes([b]) for b in range(256)), *merged]:
        text = token.decode(errors="replace")
        rows.append({"rank": len(rows), "token_bytes": base64.b64encode(token).decode()})
        rows[-1]["token_str"] = None if "\ufffd" in text else text
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(vocab["special"])]
    sizes = {"num_vocab_tokens": len(rows), "default_num_special_tokens": 64, "default_vocab_size": len(rows) + 64}
    config = {"pattern": _SPLIT, "version": vocab["version"]} | sizes
    return {"tekken.json": {"config": config, "vocab": rows, "special_tokens": special}}


def _wordpiece(vocab: Json) -> dict[str, Any]:
    """WordPiece: tokenizer.json, or with ``list`` vocab.txt, and tokenizer_config.json; ``first``: before pieces."""
    texts = [text for text, _ in _texts() if text != "\u2581" and text.isprintable()]
    words = dict.fromkeys(text.removeprefix("\u2581") for text in texts if text.startswith("\u2581") or len(text) == 1)
    continuations = [f"##{text}" for text in texts if "\u2581" not in text]
    first = vocab.get("first", ("[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
    ids = {text: i for i, text in enumerate([*first, *words, *continuations][: vocab.get("pieces", 600)])}
    special = {kind: f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special_added = [{"id": ids[text], "content": text} | flags for text in first if text in special.values()]
    added = special_added + _added(vocab, len(ids))
    config = _tokenizer_config(vocab, added)
    if vocab.get("list"):
        return {"vocab.txt": "".join(f"{text}\n" for text in ids).encode(), "tokenizer_config.json": config}
    cls, sep, a, b = (
        *({"SpecialToken": {"id": special[kind], "type_id": 0}} for kind in ("cls", "sep")),
        *({"Sequence": {"id": letter, "type_id": i}} for i, letter in enumerate("AB")),
    )
    numbers = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (special["cls"], special["sep"])}
    post = {"type": "TemplateProcessing", "single": [cls, a, sep], "pair": [cls, a, sep, b, sep]}
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    tokenizer: Json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    tokenizer |= {"normalizer": normalizer | {"lowercase": True}, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    tokenizer |= {"post_processor": post | {"special_tokens": numbers}}
    tokenizer |= {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    tokenizer |= {"model": model | {"max_input_chars_per_word": 100, "vocab": ids}}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _unigram(vocab: Json) -> dict[str, Any]:
    """Unigram like XLM-RoBERTa's: tokenizer.json and tokenizer_config.json."""
    first = ("<s>", "<pad>", "</s>", "<unk>")
    pieces = [[text, 0.0] for text in first]
    pieces += [[text, -2.5 - i / 8] for i, (text, _) in enumerate(_texts())][: vocab.get("pieces", 400)]
    pieces.append(["<mask>", 0.0])
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": text == "<mask>", "rstrip": False}
        | {"normalized": False, "special": True}
        for i, text in [*enumerate(first), (len(pieces) - 1, "<mask>")]
    ] + _added(vocab, len(pieces))
    start, end = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("<s>", "</s>"))
    a, b = ({"Sequence": {"id": letter, "type_id": 0}} for letter in "AB")
    post = {"type": "TemplateProcessing", "single": [start, a, end], "pair": [start, a, end, end, b, end]}
    numbers = {text: {"id": text, "ids": [first.index(text)], "tokens": [text]} for text in ("<s>", "</s>")}
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    tokenizer: Json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    charsmap = base64.b64encode(_CHARSMAP).decode()
    tokenizer |= {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}, "pre_tokenizer": space}
    tokenizer |= {"post_processor": post | {"special_tokens": numbers}, "decoder": space}
    tokenizer |= {"model": {"type": "Unigram", "unk_id": 3, "vocab": pieces, "byte_fallback": False}}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(vocab, added)}


def _plamo(vocab: Json) -> dict[str, Any]:
    """PLaMo's list: tokenizer.jsonl, and tokenizer_config.json."""
    names = {"unk": "UNKNOWN", "bos": "CONTROL", "eos": "CONTROL", "pad": "CONTROL", "op": "NORMAL"}
    rows = [[f"<|plamo:{name}|>", 0.0, kind, None] for name, kind in names.items()]
    rows += [[f"<0x{b:02X}>", 0.0, "BYTE", None] for b in range(256)]
    rows += [[text, -float(i), "NORMAL", None] for i, (text, _) in enumerate(_texts())]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    config = {f"{name}_token": f"<|plamo:{name}|>" for name in ("unk", "bos", "eos", "pad")}
    return {"tokenizer.jsonl": lines.encode(), "tokenizer_config.json": config | vocab.get("config", {})}


def _none(vocab: Json) -> dict[str, Any]:
    """No files: a draft model has its target's."""
    return {}


def _rwkv(vocab: Json) -> dict[str, Any]:
    """RWKV's list of byte strings: a line has a number, a literal, and its length."""
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    tokens = [bytes([b]) for b in range(256)] + [bytes(letters[c] for c in a + b) for a, b in merges()]
    lines = []
    for i, token in enumerate(dict.fromkeys(tokens), 1):
        try:
            text = repr(token.decode())
        except UnicodeDecodeError:
            text = repr(token)
        lines.append(f"{i} {text} {len(token)}\n")
    data = "".join(lines).encode()
    return {"rwkv_vocab_v20230424.txt": data, "tokenizer_config.json": vocab.get("config", {})}


_KINDS = {
    **{
        "wordpiece": _wordpiece,
        "bpe": _bpe,
        "spm": _spm,
        "spm_bpe": _spm_bpe,
        "tiktoken": _tiktoken,
        "tekken": _tekken,
    },
    **{"unigram": _unigram, "plamo": _plamo, "rwkv": _rwkv, "none": _none},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    args = parser.parse_args()
    for name in args.names or NAMES:
        print(write_checkpoint(name, args.out))


if __name__ == "__main__":
    main()
