"""Describe the checkpoints of tests/data/checkpoints: THE table of architectures, and what transformers makes of it.

    for python in PYTHON_WITH_4_57_6 PYTHON_WITH_5_18_0; do $python scripts/make_checkpoints.py [NAME ...]; done

For each row of the table transformers builds the model and saves it; what is kept is config.json, names and shapes of
the tensors (tests/data/checkpoints/NAME.json). tests/checkpoints.py draws the checkpoint from that with numpy alone.
Rows of the other major version of transformers are left out; scripts/make_convert_goldens.py makes what to expect.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

DATA = Path(__file__).parents[1] / "tests" / "data" / "checkpoints"

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint."""

    name: str
    #: Class of transformers, and its configuration beside BASE.
    model: str
    args: Json = field(default_factory=dict)
    vocab: Json
    #: Major version of transformers that makes it. 0: none does; ``args`` is config.json and ``more`` all tensors.
    version: int = 4
    #: Major version of transformers that runs it, where another one does, or 0: none.
    runs: int | None = None
    #: Of config.json: keys to add, and keys that real ones lack.
    config: Json = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    #: Tensors that transformers does not know; a layer is copied first: (from, to).
    more: dict[str, list[int]] = field(default_factory=dict)
    copy_layer: tuple[int, int] | None = None
    dtype: str = "bfloat16"
    f32: tuple[str, ...] = ()
    shards: int = 1
    files: Json = field(default_factory=dict)
    options: tuple[str, ...] = ()


# --- vocabularies ----------------------------------------------------------------------------------------------------

_FIRST = 576  # id after the pieces of byte-level BPE
_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def bpe(pre: str, *special: str, cls: str = "PreTrainedTokenizerFast", user: tuple[str, ...] = (), **more: Any) -> Json:
    """Return byte-level BPE: the first special token is eos; more: bos (its text), start (bos comes first), chat."""
    config = {"tokenizer_class": cls, "eos_token": special[0]}
    config |= {f"{key}_token": more.pop(key) for key in ("bos", "unk", "pad") if key in more}
    config |= {"chat_template": more.pop("chat")} if "chat" in more else {}
    config |= more.pop("config", {})
    start = {"starts_with": config["bos_token"]} if more.pop("start", False) else {}
    vocab = {"kind": "bpe", "pre": pre, "special": list(special), "user": list(user), "config": config}
    return vocab | start | more


def spm(cls: str = "LlamaTokenizer", first: tuple[str, ...] = ("<unk>", "<s>", "</s>"), **more: Any) -> Json:
    """Return a SentencePiece vocabulary, which begins with the tokens ``first``."""
    names = {"<unk>": "unk", "<s>": "bos", "</s>": "eos", "<bos>": "bos", "<eos>": "eos", "<pad>": "pad"}
    config = {"tokenizer_class": cls} | {f"{names[t]}_token": t for t in first if t in names}
    config |= {"chat_template": more.pop("chat")} if "chat" in more else {}
    config |= more.pop("config", {})
    return {"kind": "spm", "first": list(first), "config": config} | more


_LLAMA3 = bpe("llama-bpe", "<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
              bos="<|begin_of_text|>", start=True, chat=_CHAT, ignore_merges=True)  # fmt: skip
_QWEN = bpe("qwen2", "<|im_end|>", "<|endoftext|>", "<|im_start|>", cls="Qwen2Tokenizer", pad="<|endoftext|>",
            user=("<tool_call>", "</tool_call>", "<think>"), chat=_CHAT,
            config={"add_bos_token": False, "bos_token": None, "unk_token": None})  # fmt: skip
_QWEN35 = _QWEN | {"pre": "qwen35"}
_DEEPSEEK = bpe("deepseek-v3", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>",
                bos="<｜begin▁of▁sentence｜>", cls="LlamaTokenizerFast", start=True, merges="strings", chat=_CHAT,
                config={"add_bos_token": True, "add_eos_token": False})  # fmt: skip
_GLM = bpe("glm4", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
           user=("<think>", "</think>"), pad="<|endoftext|>", chat=_CHAT)  # fmt: skip
_GPT2 = bpe("gpt-2", "<|endoftext|>", cls="GPT2Tokenizer", bos="<|endoftext|>", unk="<|endoftext|>", split=False,
            merges="strings", config={"add_prefix_space": False})  # fmt: skip
_GEMMA_FIRST = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<unused0>")

# --- configurations --------------------------------------------------------------------------------------------------

BASE: Json = {
    "vocab_size": 640, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}  # fmt: skip
_YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
         "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
_MLA: Json = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_DEEPSEEK_V3: Json = BASE | _MLA | {
    "q_lora_rank": 128, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "max_position_embeddings": 163840, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST,
}  # fmt: skip

_README = """---
license: apache-2.0
base_model:
- Example/Tiny-Base-7B
language:
- en
- de
tags:
- moe
pipeline_tag: text-generation
library_name: transformers
---
# A small model
"""
_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05,
             "transformers_version": "4.51.0"}  # fmt: skip

# --- the table -------------------------------------------------------------------------------------------------------

ROWS = (
    Row(name="llama", model="LlamaForCausalLM", vocab=_LLAMA3, shards=2, args={
        "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "bos_token_id": _FIRST + 1, "eos_token_id": [_FIRST + 2, _FIRST]},
        files={"README.md": _README.replace("apache-2.0", "llama3.2"), "generation_config.json": _SAMPLING}),
    Row(name="qwen3-moe", model="Qwen3MoeForCausalLM", vocab=_QWEN, shards=3, args={
        "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "rope_theta": 1000000.0, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST},
        files={"README.md": _README, "generation_config.json": _SAMPLING}),
    Row(name="qwen2", model="Qwen2ForCausalLM", vocab=_QWEN, args={
        "tie_word_embeddings": True, "rope_theta": 1000000.0, "bos_token_id": _FIRST + 1, "eos_token_id": _FIRST}),
    Row(name="qwen3", model="Qwen3ForCausalLM", vocab=_QWEN, args={
        "head_dim": 128, "tie_word_embeddings": True, "rope_theta": 1000000.0, "eos_token_id": _FIRST}),
    Row(name="mixtral", model="MixtralForCausalLM", shards=2,
        vocab=spm(chat=_CHAT, config={"add_bos_token": True, "add_eos_token": False, "legacy": True}), args={
            "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1000000.0, "sliding_window": None}),
)  # fmt: skip


# --- description -----------------------------------------------------------------------------------------------------


def describe(row: Row) -> Json:
    """Return what tests/checkpoints.py needs of a row."""
    if row.version:
        config, tensors = saved(row)
    else:
        config, tensors = dict(row.args), {}
    if row.copy_layer:
        old, new = (f".layers.{i}." for i in row.copy_layer)
        tensors |= {name.replace(old, new): shape for name, shape in tensors.items() if old in name}
    config = {key: value for key, value in (config | row.config).items() if key not in row.drop}
    text: Json = {"config": config, "vocab": row.vocab, "tensors": compact(tensors) | row.more}
    defaults = Row(name="", model="", vocab={})
    for key in ("dtype", "f32", "shards", "files", "options"):
        if (value := getattr(row, key)) != getattr(defaults, key):
            text[key] = value
    text["transformers"] = (row.version if row.runs is None else row.runs) or None
    return text


def saved(row: Row) -> tuple[Json, dict[str, list[int]]]:
    """Return config.json and the tensors' shapes as transformers saves the model of a row."""
    cls = getattr(transformers, row.model)
    config = cls.config_class(**(BASE | row.args))
    config.architectures = [row.model]
    torch.manual_seed(0)
    model = cls(config).to(getattr(torch, row.dtype))
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)
        (file,) = Path(out).glob("*.safetensors")
        with file.open("rb") as stored:
            header = json.loads(stored.read(struct.unpack("<Q", stored.read(8))[0]))
        written = json.loads((Path(out) / "config.json").read_text())
    return written, {name: info["shape"] for name, info in header.items() if name != "__metadata__"}


def compact(tensors: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the patterns of tests/checkpoints.py's expand(): numbers of a name that make up a whole grid, as ranges."""
    groups: dict[tuple[Any, ...], set[tuple[int, ...]]] = defaultdict(set)
    for name, shape in tensors.items():
        parts = re.split(r"(?<=\.)(\d+)(?=\.)", name)
        groups[tuple(parts[::2]), tuple(shape)].add(tuple(map(int, parts[1::2])))
    patterns = {}
    for (texts, shape), numbers in groups.items():
        for grid in grids(sorted(numbers)):
            ranges = ["{" + ranged(axis) + "}" for axis in grid]
            patterns["".join(a + b for a, b in zip(texts, [*ranges, ""], strict=True))] = list(shape)
    return dict(sorted(patterns.items()))


def grids(numbers: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Return grids (numbers of each axis) that cover the tuples."""
    if len(numbers[0]) < 2:
        return [[[n for (n,) in numbers]]] if numbers[0] else [[]]
    tails: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for first in sorted({n[0] for n in numbers}):
        tails[tuple(n[1:] for n in numbers if n[0] == first)].append(first)
    return [[firsts, *grid] for tail, firsts in tails.items() for grid in grids(list(tail))]


def ranged(numbers: list[int]) -> str:
    """Return ``0-3,5``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1][-1] = n
        else:
            parts.append([n, n])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)


def text_of(what: Json) -> str:
    """Return JSON: a line per key, of objects in it a line per key, too."""
    lines = []
    for key, value in what.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    args = parser.parse_args()
    version = int(transformers.__version__.split(".")[0])
    failed = 0
    for row in ROWS:
        if args.names and row.name not in args.names or row.version not in (0, version):
            continue
        try:
            text = text_of(describe(row))
        except Exception as error:  # the others can be made all the same
            failed += 1
            print(f"{row.name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        (DATA / f"{row.name}.json").write_text(text, encoding="utf-8", newline="\n")
        print(row.name, len(text))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
