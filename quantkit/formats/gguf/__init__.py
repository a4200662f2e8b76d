"""GGUF, the file format of llama.cpp and ik_llama.cpp: a reader for any file, and a writer of fixed layouts.

A GGUF file of version 2 or 3 (all integers little-endian; the two versions differ in nothing here)::

    "GGUF"  u32 version  u64 n_tensors  u64 n_kv
    n_kv fields:      string key  u32 value type  value
    n_tensors infos:  string name  u32 n_dims  u64 ne[n_dims]  u32 tensor type  u64 offset
    zeros up to a multiple of the alignment (general.alignment, a power of two; 32 without the key)
    tensor data; an info's offset counts from here and is a multiple of the alignment

    string = u64 length, bytes        array value = u32 item type, u64 count, items

A model may be split into shards named PREFIX-00001-of-00003.gguf, each a GGUF file with the keys split.no,
split.count and split.tensors.count; the other metadata is in the first one. ``open_gguf`` opens any shard as
the whole model.

The reader treats files as untrusted: every length and count is checked against the remaining bytes before any loop or
allocation, and any violation is a FormatError with the file, the item and the byte offset. It refuses what llama.cpp
b11434's gguf.cpp refuses, and also: overlapping tensors, tensors past the end of the file, booleans other than 0 and 1,
keys and names that are empty, not UTF-8 or contain a NUL. It accepts some files that gguf.cpp refuses: names of 64
bytes and more (up to ``MAX_NAME``) and more than four dimensions (up to ``MAX_DIMS``), both of which diffusion models
have, gaps between tensors, tensors in any order. As in gguf.cpp, a tensor may be empty (a dimension of 0) or a scalar
(no dimensions). Arrays of arrays, which the specification allows and no runtime reads, are refused. String values may
hold any bytes (tokenizers do): they are decoded with "surrogateescape", which ``Field.of`` turns back into the same
bytes.
"""

from __future__ import annotations

from quantkit.formats.gguf.fields import Field, ValueType
from quantkit.formats.gguf.model import (
    SPLIT_KEYS,
    GGUFFile,
    open_first_shard,
    open_gguf,
    open_model,
    open_shards,
    parse_split_path,
    split_fields,
    split_path,
)
from quantkit.formats.gguf.reader import TensorInfo
from quantkit.formats.gguf.writer import Layout, layout_gguf, write_gguf

__all__ = [
    "SPLIT_KEYS",
    "Field",
    "GGUFFile",
    "Layout",
    "TensorInfo",
    "ValueType",
    "layout_gguf",
    "open_first_shard",
    "open_gguf",
    "open_model",
    "open_shards",
    "parse_split_path",
    "split_fields",
    "split_path",
    "write_gguf",
]
