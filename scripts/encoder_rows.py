"""The rows of tokens of encoders, by transformers' classes, for scripts/make_convert_goldens.py embeddings.

Weights are those of the checkpoint, renamed where transformers has another layout than the class that the checkpoint
names. transformers has no class for Jina BERT 2, NeoBERT and Nomic BERT with experts, which are written here in a few
lines of torch, by their remote code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from stand_ins import State, model_of, state_of
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


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint as functions, by the names of their modules; sizes of its attention."""

    state: State
    n_head: int
    epsilon: float

    def linear(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return nn.functional.layer_norm(x, weight.shape, weight, bias, self.epsilon)

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.state[f"{name}.weight"]
        return nn.functional.rms_norm(x, weight.shape, weight, self.epsilon)

    def heads(self, x: Tensor) -> Tensor:
        """Return [n_head, n, width of a head] of rows [n, width]."""
        return x.reshape(len(x), self.n_head, -1).transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Return the rows [n, width] of attention over all tokens, for heads [n_head, n, width of a head]."""
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def rotate(x: Tensor, base: float, neighbours: bool) -> Tensor:
    """Return heads [n_head, n, width of a head] after rope of neighbouring values, or of both halves."""
    n, half = x.shape[1], x.shape[2] // 2
    angles = torch.arange(n)[:, None] * base ** (-torch.arange(half) / half)
    pairs = x.unflatten(2, (half, 2)) if neighbours else x.unflatten(2, (2, half)).transpose(2, 3)
    a, b = pairs.unbind(-1)
    rotated = torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
    return (rotated if neighbours else rotated.transpose(2, 3)).flatten(2)


def jina_bert(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
    """BERT with ALiBi in both directions and a gated feed-forward layer."""
    c = description.config
    w = Weights(state_of(description, {"^bert\\.": ""}), c["num_attention_heads"], c.get("layer_norm_eps", 1e-12))
    positions = torch.arange(tokens.shape[1])
    slopes = torch.tensor([2.0 ** (-8 / w.n_head * (h + 1)) for h in range(w.n_head)])
    bias = -slopes[:, None, None] * (positions[:, None] - positions[None]).abs()
    x = w.state["embeddings.word_embeddings.weight"][tokens[0]] + w.state["embeddings.token_type_embeddings.weight"][0]
    x = w.norm(x, "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = (w.heads(w.linear(x, f"{layer}attention.self.{name}")) for name in ("query", "key", "value"))
        attended = w.linear(attend(q, k, v, bias), f"{layer}attention.output.dense")
        x = w.norm(attended + x, f"{layer}attention.output.LayerNorm")
        gate, up = w.linear(x, f"{layer}mlp.gated_layers").chunk(2, -1)
        x = w.norm(w.linear(nn.functional.gelu(gate) * up, f"{layer}mlp.wo") + x, f"{layer}mlp.layernorm")
    return x


def neobert(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
    """NeoBERT, in whose qkv the rows of q, k and v of a head follow one another."""
    c = description.config
    w = Weights(state_of(description, {"^model\\.": ""}), c["num_attention_heads"], c["norm_eps"])
    x = w.state["encoder.weight"][tokens[0]]
    for i in range(c["num_hidden_layers"]):
        layer = f"transformer_encoder.{i}."
        q, k, v = w.heads(w.linear(w.rms_norm(x, f"{layer}attention_norm"), f"{layer}qkv")).chunk(3, -1)
        q, k = (rotate(part, 10000.0, neighbours=True) for part in (q, k))
        x = x + w.linear(attend(q, k, v), f"{layer}wo")
        gate, up = w.linear(w.rms_norm(x, f"{layer}ffn_norm"), f"{layer}ffn.w12").chunk(2, -1)
        x = x + w.linear(nn.functional.silu(gate) * up, f"{layer}ffn.w3")
    return w.rms_norm(x, "layer_norm")


def nomic_bert_moe(description: checkpoints.Description, path: Path, tokens: Tensor) -> Tensor:
    """Nomic BERT whose second of two layers has experts, with shares that do not add up to 1.

    The bias of their sum is omitted: llama.cpp's converter drops it.
    """
    c = description.config
    w = Weights(state_of(description), c["n_head"], c["layer_norm_epsilon"])
    x = w.state["embeddings.word_embeddings.weight"][tokens[0]] + w.state["embeddings.token_type_embeddings.weight"][0]
    x = w.norm(x, "emb_ln")
    for i in range(c["n_layer"]):
        layer = f"encoder.layers.{i}."
        q, k, v = (w.heads(part) for part in w.linear(x, f"{layer}attn.Wqkv").chunk(3, -1))
        q, k = (rotate(part, float(c["rotary_emb_base"]), neighbours=False) for part in (q, k))
        x = w.norm(w.linear(attend(q, k, v), f"{layer}attn.out_proj") + x, f"{layer}norm1")
        if i % c["moe_every_n_layers"] == 1:
            out = _experts(w, f"{layer}mlp.", x, c["moe_top_k"])
        else:
            out = w.linear(nn.functional.gelu(w.linear(x, f"{layer}mlp.fc1")), f"{layer}mlp.fc2")
        x = w.norm(out + x, f"{layer}norm2")
    return x


def _experts(w: Weights, name: str, x: Tensor, n_used: int) -> Tensor:
    shares, indices = w.linear(x, f"{name}router.layer").softmax(-1).topk(n_used, -1)
    n_expert = len(w.state[f"{name}router.layer.weight"])
    up, down = (w.state[f"{name}experts.mlp.{part}"].unflatten(0, (n_expert, -1)) for part in ("w1", "w2"))
    hidden = nn.functional.gelu(torch.einsum("nw,nefw->nef", x, up[indices]))
    return torch.einsum("ne,nef,nefw->nw", shares, hidden, down[indices])


def sentence_embeddings(folder: Path, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return float32 [texts, n_embd]: the mean of a text's rows, of length 1, by a checkpoint's own tokenizer.

    Texts are computed one by one, cut to the positions of the model.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    length = model.config.max_position_embeddings
    inputs = (tokenizer(text, return_tensors="pt", truncation=True, max_length=length) for text in texts)
    with torch.no_grad():
        means = [model(**tokens).last_hidden_state[0].mean(0) for tokens in inputs]
    rows: npt.NDArray[np.float32] = nn.functional.normalize(torch.stack(means), dim=1).numpy()
    return rows


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
    "neobert": neobert,
    "nomic-bert": nomic_bert,
    **dict.fromkeys(("nomic-bert-moe", "nomic-bert-xlm"), nomic_bert_moe),
    **dict.fromkeys(("roberta", "roberta-classifier"), from_checkpoint("RobertaModel")),
    "t5": encoder_of("T5ForConditionalGeneration"),
    "t5-encoder": encoder_of("T5EncoderModel"),
    "umt5": encoder_of("UMT5ForConditionalGeneration"),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-classifier"), from_checkpoint("XLMRobertaModel")),
}
