"""The prediction layer of a model (NextN, multi-token prediction): one more layer, which guesses a token further ahead.

It takes the row h that the model made of a token, normalized as for its output matrix, and the embedding of the token
that follows::

    x = eh_proj [enorm(embedding of token t + 1), hnorm(h_t)]
    x = a layer of the model, at position t + 1, attending to the rows before
    logits = head(head_norm(x))              of token t + 2; norm and head are its own, or else the model's

so that a sequence of n tokens gives n - 1 rows. Sources: llama.cpp b11434 src/models/glm4-moe.cpp, deepseek2.cpp,
qwen35.cpp, qwen35moe.cpp, qwen3next.cpp (graph_mtp), tools/imatrix/imatrix.cpp (nextn_collector).
"""

from __future__ import annotations

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.kernels.formats import has_decoder
from quantkit.model.builder import Builder
from quantkit.model.check import check_graph
from quantkit.model.graph import add_layer
from quantkit.model.hparams import HParams
from quantkit.model.ops import Embed, Graph, Join


def nextn_layers(source: GGUFFile) -> tuple[int, ...]:
    """Return the numbers of the prediction layers that a file holds, not only mentions."""
    h = HParams(source)
    n = h.int("nextn_predict_layers", 0)
    found = {name.split(".")[1] for name in source.tensors if name.startswith("blk.") and ".nextn." in name}
    return tuple(i for i in range(h.n_layer, h.n_layer + n) if str(i) in found)


def build_nextn(source: GGUFFile, n_ctx: int = 0) -> Graph:
    """Return the prediction layer of a model, or of a file that holds it alone; its ``given`` value is h.

    Args:
        source: the opened file; n_ctx: as build_graph takes it.

    Raises:
        TypeNotSupported: the architecture's is not known, or there are several.
        FormatError: a tensor or key is missing.
    """
    b = Builder(source, n_ctx)
    layers, where = nextn_layers(source), source.paths[0]
    if not b.arch.nextn:
        raise TypeNotSupported(f"{where}: how a prediction layer of the architecture {b.h.arch} runs is not known here")
    if len(layers) != 1:
        raise TypeNotSupported(f"{where}: {len(layers)} prediction layers; one is what is known here")
    b.layer, b.n_blocks = layers[0], layers[0] + 1
    own = "nextn.embed_tokens.weight"
    embedded, h = b.value("nextn_embeddings", b.h.n_embd), b.value("nextn_h", b.h.n_embd)
    b.add(Embed(out=embedded, weight=b.matrix(own) if b.has(own) else b.outside("token_embd.weight")))
    tokens, rows = b.norm(embedded, "nextn.enorm"), b.norm(h, "nextn.hnorm")
    both = b.value("nextn_both", 2 * b.h.n_embd)
    b.add(Join(out=both, a=tokens, b=rows, period_a=b.h.n_embd, period_b=b.h.n_embd))
    x = add_layer(b, b.mul_mat(both, "nextn.eh_proj"))
    own_head = b.has("nextn.shared_head_head.weight")
    if b.has("nextn.shared_head_norm.weight"):
        x = b.norm(x, "nextn.shared_head_norm")
        head = b.selected(x)
    else:
        b.layer = b.n_blocks
        head = b.selected(b.norm(x, "output_norm"))
    b.layer = layers[0] if own_head else b.n_blocks
    tied = "output" if b.has("output.weight") else "token_embd"
    logits = b.mul_mat(head, "nextn.shared_head_head" if own_head else tied, out="nextn_logits")
    _check_all_used(b, f"blk.{layers[0]}.")
    graph = Graph(tuple(b.ops), logits, tuple(b.caches), tuple(b.states), (h,))
    check_graph(graph, has_decoder)
    return graph


def _check_all_used(b: Builder, prefix: str) -> None:
    left = [n for n in b.source.tensors if n.startswith(prefix) and n not in b.used and not n.endswith("scale")]
    if left:
        raise FormatError(
            f"{b.source.paths[0]}: {len(left)} tensors of the prediction layer would not be used "
            f"({', '.join(left[:4])})"
        )
