"""The prediction layer of a model (NextN, multi-token prediction), which predicts the token after the next.

Its inputs are the model's last row h of a token, normalized as for the output matrix, and the embedding of the next
token::

    x = eh_proj [enorm(embedding of token t + 1), hnorm(h_t)]
    x = a layer of the model, at position t + 1, attending to the rows before
    logits = head(head_norm(x))              of token t + 2; norm and head may be the model's

so that a sequence of n tokens gives n - 1 rows. Sources: llama.cpp b11434 src/models/glm4-moe.cpp, deepseek2.cpp,
qwen35.cpp, qwen35moe.cpp, qwen3next.cpp (graph_mtp), tools/imatrix/imatrix.cpp (nextn_collector).
"""

from __future__ import annotations

from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.formats import has_decoder
from quantkit.model.builder import Builder
from quantkit.model.check import check_graph
from quantkit.model.graph import add_layer
from quantkit.model.hparams import HParams
from quantkit.model.ops import Embed, Graph, Join, Value


def nextn_layers(source: GGUFFile) -> tuple[int, ...]:
    """Return the indices of the prediction layers whose tensors are in the file."""
    h = HParams(source)
    n = h.int("nextn_predict_layers", 0)
    numbers = {name.split(".")[1] for name in source.tensors if name.startswith("blk.") and ".nextn." in name}
    return tuple(i for i in range(h.n_layer, h.n_layer + n) if str(i) in numbers)


def build_nextn(source: GGUFFile, n_ctx: int = 0) -> Graph:
    """Return the prediction layer of a model, or of a file that contains only it; its ``inputs`` are h.

    Args:
        source: the opened file; n_ctx: as build_graph takes it.

    Raises:
        TypeNotSupported: the architecture's prediction layer is not supported, or there are several.
        FormatError: a tensor or key is missing.
    """
    b = Builder(source, n_ctx)
    layers, where = nextn_layers(source), source.paths[0]
    if not b.arch.nextn:
        raise TypeNotSupported(
            f"{where}: prediction layers of the architecture {b.h.arch} are not supported", "QK-E306"
        )
    if len(layers) != 1:
        raise TypeNotSupported(f"{where}: {len(layers)} prediction layers; only one is supported", "QK-E306")
    b.layer, b.n_blocks = layers[0], layers[0] + 1
    h = b.value("nextn_h", b.h.n_embd)
    with b.require_all_tensors(f"blk.{b.layer}."):
        logits = _prediction(b, h)
    graph = Graph(tuple(b.ops), logits, tuple(b.caches), tuple(b.states), (h,))
    check_graph(graph, has_decoder)
    return graph


def _prediction(b: Builder, h: Value) -> Value:
    """Add the operations of the current layer, which predicts from h, and return the logits."""
    embed_name, layer = "nextn.embed_tokens.weight", b.layer
    embedded = b.value("nextn_embeddings", b.h.n_embd)
    b.add(
        Embed(out=embedded, weight=b.matrix(embed_name) if b.has(embed_name) else b.global_matrix("token_embd.weight"))
    )
    tokens, rows = b.norm(embedded, "nextn.enorm"), b.norm(h, "nextn.hnorm")
    concatenated = b.value("nextn_both", 2 * b.h.n_embd)
    b.add(Join(out=concatenated, a=tokens, b=rows, period_a=b.h.n_embd, period_b=b.h.n_embd))
    x = add_layer(b, b.mul_mat(concatenated, "nextn.eh_proj"))
    own_head = b.has("nextn.shared_head_head.weight")
    if b.has("nextn.shared_head_norm.weight"):
        x = b.norm(x, "nextn.shared_head_norm")
        head = b.select_outputs(x)
    else:
        b.layer = b.n_blocks
        head = b.select_outputs(b.norm(x, "output_norm"))
    b.layer = layer if own_head else b.n_blocks
    tied = "output" if b.has("output.weight") else "token_embd"
    return b.mul_mat(head, "nextn.shared_head_head" if own_head else tied, out="nextn_logits")
