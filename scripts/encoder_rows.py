"""The rows of tokens of encoders, by transformers' classes, for scripts/make_convert_goldens.py embeddings.

Weights are those of the checkpoint, renamed where transformers has another layout than the class that the checkpoint
names. transformers has no class for Jina BERT 2, whose remote code is written here in a few lines of torch; NeoBERT and
Nomic BERT with experts have no rows here: the tests compare them with llama.cpp alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from stand_ins import model_of, state_of
from torch import Tensor, nn

import checkpoints

Rows = Callable[[checkpoints.Description, Path, Tensor], Tensor]


def from_checkpoint(cls: str) -> Rows:
    """Return a function that gives the rows of this class, loaded from a checkpoint without its heads."""

    def rows(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
        model, info = getattr(transformers, cls).from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
        if bad := [name for name in info["missing_keys"] if not name.startswith(("pooler.", "decoder."))]:
            raise ValueError(f"missing: {bad[:5]}")
        return model.eval()(tokens).last_hidden_state[0]

    return rows


def encoder_of(cls: str) -> Rows:
    """Return a function that gives the rows of the encoder of a class with a decoder."""

    def rows(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
        model = getattr(transformers, cls).from_pretrained(path, dtype=torch.float32, local_files_only=True)
        return model.eval().get_encoder()(tokens).last_hidden_state[0]

    return rows


def nomic_bert(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
    names = {
        r"^emb_ln\.": "embeddings.LayerNorm.",
        r"^encoder\.layers\.": "layers.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
        r"\.fc11\.": ".up_proj.",
        r"\.fc12\.": ".gate_proj.",
        r"\.fc2\.": ".down_proj.",
    }
    c, state = description.config, state_of(description, names)
    for name in [name for name in state if "attn.Wqkv" in name]:
        for letter, x in zip("qkv", state.pop(name).chunk(3), strict=True):
            state[name.replace("attn.Wqkv", f"self_attn.{letter}_proj")] = x
    sizes = {
        "hidden_size": c["n_embd"],
        "intermediate_size": c["n_inner"],
        "num_hidden_layers": c["n_layer"],
        "num_attention_heads": c["n_head"],
        "layer_norm_eps": c["layer_norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": float(c["rotary_emb_base"])},
        "tie_word_embeddings": False,
    }
    config = {key: c[key] for key in ("vocab_size", "type_vocab_size")} | sizes
    return model_of(transformers.NomicBertModel, config, state).eval()(tokens).last_hidden_state[0]


def gemma_embedding(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
    """Gemma 3 with the layers of llama.cpp, the sixth of which is the first without a window."""
    layers = {"layer_types": ["sliding_attention"] * description.config["num_hidden_layers"]}
    model = model_of(transformers.Gemma3TextModel, description.config | layers, state_of(description))
    return model.eval()(tokens).last_hidden_state[0]


def llama_embed(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
    """Llama whose tokens see those after them, too."""
    config = {key: value for key, value in description.config.items() if key != "pooling"}
    model, n = model_of(transformers.LlamaModel, config, state_of(description)), tokens.shape[1]
    return model.eval()(tokens, attention_mask=torch.zeros(1, 1, n, n)).last_hidden_state[0]


def jina_bert(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
    """BERT with ALiBi in both directions and a gated feed-forward layer."""
    c, state = description.config, state_of(description, {"^bert\\.": ""})
    width, heads, eps = c["hidden_size"], c["num_attention_heads"], c.get("layer_norm_eps", 1e-12)

    def norm(x: Tensor, name: str) -> Tensor:
        return nn.functional.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    n, head = tokens.shape[1], width // heads
    distances = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs()
    slopes = torch.tensor([2.0 ** (-8 / heads * (h + 1)) for h in range(heads)])
    x = state["embeddings.word_embeddings.weight"][tokens[0]] + state["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{layer}attention.self.{name}").reshape(n, heads, head).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / head**0.5 - slopes[:, None, None] * distances
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, width)
        x = norm(linear(attended, f"{layer}attention.output.dense") + x, f"{layer}attention.output.LayerNorm")
        gate, up = linear(x, f"{layer}mlp.gated_layers").chunk(2, -1)
        x = norm(linear(nn.functional.gelu(gate) * up, f"{layer}mlp.wo") + x, f"{layer}mlp.layernorm")
    return x


#: By the name of the checkpoint.
ROWS: Mapping[str, Rows] = {
    **dict.fromkeys(("bert", "bert-masked", "bert-classifier"), from_checkpoint("BertModel")),
    "camembert": from_checkpoint("CamembertModel"),
    **dict.fromkeys(("distilbert", "distilbert-classifier"), from_checkpoint("DistilBertModel")),
    "eurobert": from_checkpoint("EuroBertModel"),
    **dict.fromkeys(("gemma-embedding", "gemma-embedding-dense"), gemma_embedding),
    "jina-bert": jina_bert,
    "llama-embed": llama_embed,
    "modernbert": from_checkpoint("ModernBertModel"),
    "mt5": encoder_of("MT5ForConditionalGeneration"),
    "nomic-bert": nomic_bert,
    **dict.fromkeys(("roberta", "roberta-classifier"), from_checkpoint("RobertaModel")),
    "t5": encoder_of("T5ForConditionalGeneration"),
    "t5-encoder": encoder_of("T5EncoderModel"),
    "umt5": encoder_of("UMT5ForConditionalGeneration"),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-classifier"), from_checkpoint("XLMRobertaModel")),
}
