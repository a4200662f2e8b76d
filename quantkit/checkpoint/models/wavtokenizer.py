"""WavTokenizer's decoder of speech: convolutions (PosNet) and ConvNeXt blocks.

Facts of llama.cpp b11434, conversion/wavtokenizer.py.
"""

from __future__ import annotations

from quantkit.checkpoint.key_rows import VOCAB_SIZE, Always, Copied
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import Drop
from quantkit.checkpoint.vocab.tokenizer import write_none

# fmt: off
ARCHITECTURES: dict[str, Architecture] = {
    "WavTokenizerDec": Architecture(
        "wavtokenizer-dec",
        stored=(Drop(r"codebook\.(cluster_size|embed_avg|inited)$"),),
        keys=(
            VOCAB_SIZE,
            Copied(".features_length", "n_embd_features", required=True),
            Copied(".feed_forward_length", "n_ff", required=True),
            Copied(".attention.group_norm_epsilon", "group_norm_epsilon", "f32", required=True),
            Copied(".attention.group_norm_groups", "group_norm_groups", required=True),
            Copied(".posnet.embedding_length", "posnet.n_embd", required=True),
            Copied(".posnet.block_count", "posnet.n_layer", required=True),
            Copied(".convnext.embedding_length", "convnext.n_embd", required=True),
            Copied(".convnext.block_count", "convnext.n_layer", required=True),
            Always(".attention.causal", False, "flag"),
        ),
        vocab=write_none,
    ),
}
# fmt: on
