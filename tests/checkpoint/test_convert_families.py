"""What only some families of models have: files of ranks, latent heads, and what their configurations must say."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses
from tiny_checkpoints import added_token, bf16, moe_arrays, moe_config, tokenizer, write_checkpoint

from quantkit.checkpoint import Checkpoint, OpenOptions, open_checkpoint
from quantkit.checkpoint.vocab import tiktoken
from quantkit.errors import FormatError

Arrays = dict[str, np.ndarray]
RANKS = [*(bytes([i]) for i in range(256)), b"th", b"in", b"ing", b"thing", b"  ", b"    ", b"xyz"]
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "kv_lora_rank": 32,
    "vocab_size": len(RANKS) + 3,
    "max_position_embeddings": 128,
}


def ranks_file(folder: Path, name: str, tokens: list[bytes]) -> Path:
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)]
    (folder / name).write_bytes(b"".join(lines))
    return folder / name


def latent(folder: Path, rows: int = 2 * (16 + 24), **config: Any) -> Path:
    """Write a model of one layer with latent heads and Kimi's vocabulary."""
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens.weight": (LATENT["vocab_size"], 64), "lm_head.weight": (LATENT["vocab_size"], 64)}
    shapes |= {"model.layers.0.self_attn.kv_b_proj.weight": (rows, 32), "model.layers.1.eh_proj.weight": (64, 128)}
    arrays = {name: bf16(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    write_checkpoint(folder, LATENT | config, arrays)
    (folder / "tokenizer.json").unlink()
    ranks_file(folder, "tiktoken.model", RANKS)
    return folder


def values(opened: Checkpoint, name: str) -> np.ndarray:
    info = opened.tensors[name]
    out = np.empty(info.nbytes, np.uint8)
    opened.read(info, out, 0)
    return out.view(np.uint16).reshape(info.shape[::-1])


def plain_parts(ranks: dict[bytes, int], token: bytes, below: int) -> list[bytes]:
    parts = [bytes([byte]) for byte in token]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ranks]
        rank, i = min(pairs, default=(below, 0))
        if rank >= below:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_merges_follow_from_ranks() -> None:
    rng = np.random.default_rng(5)
    tokens = [bytes([i]) for i in range(97, 101)]
    while len(tokens) < 300:
        token = rng.integers(97, 101, rng.integers(2, 9)).astype(np.uint8).tobytes()
        tokens += [] if token in tokens else [token]
    ranks = {token: i for i, token in enumerate(tokens)}
    merges = [plain_parts(ranks, token, rank) for token, rank in ranks.items() if len(token) > 1]
    expected = [f"{a[0].decode()} {a[1].decode()}" for a in merges if len(a) == 2]
    assert list(tiktoken.merges_of(ranks)) == expected
    assert 20 < len(expected) < len(merges)


def test_ranks_become_a_vocabulary(tmp_path: Path) -> None:
    with_names = {
        "added_tokens_decoder": {str(len(RANKS)): {"content": "[BOS]", "special": True}},
        "bos_token": "[BOS]",
    }
    folder = latent(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(with_names))
    opened = open_checkpoint(folder)
    n = len(RANKS)
    assert opened.get("tokenizer.ggml.pre") == "kimi-k2"
    assert opened.get("tokenizer.ggml.tokens")[256:] == [
        *("th", "in", "ing", "thing", "ĠĠ", "ĠĠĠĠ", "xyz"),
        *("[BOS]", f"<|reserved_token_{n + 1}|>", f"<|reserved_token_{n + 2}|>"),
    ]
    assert opened.get("tokenizer.ggml.token_type") == [1] * n + [3] * 3
    assert opened.get("tokenizer.ggml.merges") == ["t h", "i n", "in g", "th ing", "Ġ Ġ", "ĠĠ ĠĠ"]  # noqa: RUF001


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (b"dGg= 0\n!! 1\n", "QK-E114 2 Base64"),
        (b"dGg= 0 1\n", "QK-E114 1 Base64"),
        (b"dGg= x\n", "QK-E114 1 Base64"),
        (b"dGg= -1\n", "QK-E114 1 2 -1"),
        (b"dGg= 99999999999\n", "QK-E114 1 2 99999999999"),
        (b"dGg= 266\n", "QK-E114 1 vocab_size config.json 266"),
        (base64.b64encode(bytes(5000)) + b" 0\n", "QK-E114 1 5000"),
    ],
)
def test_a_damaged_rank_file_is_refused(tmp_path: Path, data: bytes, refusal: str) -> None:
    folder = latent(tmp_path)
    (folder / "tiktoken.model").write_bytes(data)
    with refuses(FormatError, refusal):
        open_checkpoint(folder)


def test_latent_heads_are_split(tmp_path: Path) -> None:
    opened = open_checkpoint(latent(tmp_path))
    rng = np.random.default_rng(1)
    for _ in range(2):
        rng.normal(size=(LATENT["vocab_size"], 64))
    heads = bf16(rng.normal(size=(80, 32)).astype(np.float32)).reshape(2, 40, 32)
    np.testing.assert_array_equal(values(opened, "blk.0.attn_k_b.weight"), heads[:, :16].transpose(0, 2, 1))
    np.testing.assert_array_equal(values(opened, "blk.0.attn_v_b.weight"), heads[:, 16:])
    assert opened.get("deepseek2.attention.head_count_kv") == 1
    assert opened.get("deepseek2.attention.key_length") == 40
    assert not any("eh_proj" in name for name in opened.tensors)


def test_latent_heads_of_wrong_shape_are_refused(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E106 kv_b_proj.weight 2 16 24", "[64, 32]"):
        open_checkpoint(latent(tmp_path, rows=64))


def glm(**options: Any) -> dict[str, Any]:
    return moe_config(
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        n_routed_experts=4,
        first_k_dense_replace=0,
        **options,
    )


def test_a_vocabulary_without_its_special_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, glm(), moe_arrays())
    with refuses(FormatError, "QK-E114 [gMASK]"):
        open_checkpoint(folder, OpenOptions(pre="glm4"))


def test_special_tokens_of_glm_are_found(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, glm(vocab_size=100), moe_arrays())
    vocab = tokenizer()
    for i, text in enumerate(("[gMASK]", "<|user|>", "<|endoftext|>", "<|observation|>")):
        vocab["added_tokens"].append(added_token(96 + i, text))
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    opened = open_checkpoint(folder, OpenOptions(pre="glm4"))
    ids = [opened.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eot", "unknown", "eom", "eos")]
    assert ids == [96, 97, 98, 99, 95]


@pytest.mark.parametrize("factor", ["0.5", 2.0, -1.0, float("nan"), [1]])
def test_an_invalid_partial_rotary_factor_is_refused(tmp_path: Path, factor: object) -> None:
    folder = write_checkpoint(tmp_path, glm(partial_rotary_factor=factor), moe_arrays())
    with refuses(FormatError, "QK-E112 partial_rotary_factor"):
        open_checkpoint(folder, OpenOptions(pre="glm4"))
