"""Dream and RND1: language models that fill in masked tokens.

Facts of llama.cpp b11434, conversion/dream.py.
"""

from __future__ import annotations

from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.models import qwen
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import Always, Architecture, Copied, HfClass, SetKeys
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary

#: Of models that fill in masked tokens of a text.
DIFFUSION_KEYS: tuple[SetKeys, ...] = (
    Always(".attention.causal", False, "flag"),
    Copied("tokenizer.ggml.mask_token_id", "mask_token_id"),
)


def write_dream(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary, else BPE (DreamModel)."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    else:
        write_bpe(v, as_listed=True)


#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "DreamModel": Architecture("dream", keys=(set_pooling, *DIFFUSION_KEYS), vocab=write_dream),
    "RND1": Architecture("rnd1", rules=qwen.STACK_EXPERTS, keys=(*qwen.EXPERT_WIDTHS, *DIFFUSION_KEYS)),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "RND1": HfClass("rnd1", keys={".expert_count": "num_experts"}, config_setters=(config_values.set_mask_token,)),
    "DreamModel": HfClass("Dream", config_setters=(config_values.set_mask_token,)),
}
