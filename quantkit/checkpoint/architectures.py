"""The architectures that are converted: one row for each class of transformers.

A row says what the model is called in GGUF, by which rules its tensors change on the way (``tensors``), which keys
follow the base ones (``keys``), and what kind of vocabulary it has (``vocab.WRITERS``). Facts of llama.cpp b11434,
conversion/*.py. A class that is like another is a name of the same row; what rows cannot say is a function named in
them (families/).
"""

from __future__ import annotations

from difflib import get_close_matches

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.families import llama, qwen
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensors import Renamed
from quantkit.errors import TypeNotSupported

_LLAMA = Architecture(
    "llama",
    stored=(Renamed(r"text_model\.", ""),),
    rules=(*llama.ROPE_PERMUTED, llama.MIXTRAL_EXPERTS),
    keys=llama.LLAMA_KEYS,
    vocab="llama",
    extra=llama.rope_factors,
)
_QWEN2 = Architecture("qwen2", keys=(qwen.set_pooling,), vocab="sentencepiece or bpe")
_QWEN3 = Architecture("qwen3", keys=(qwen.set_pooling,), vocab="sentencepiece or bpe")

#: Class of transformers -> how it is converted.
ROWS: dict[str, Architecture] = {
    **dict.fromkeys(("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _LLAMA),
    "IQuestCoderForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen2MoeForCausalLM": Architecture("qwen2moe", rules=qwen.QWEN_EXPERTS, keys=qwen.EXPERT_WIDTHS),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", rules=qwen.QWEN_EXPERTS, keys=qwen.EXPERT_WIDTHS),
}


def find_architecture(config: Config) -> Architecture:
    """Return the row of a configuration's class. Raises TypeNotSupported if there is none."""
    row = ROWS.get(config.architecture)
    if row is not None:
        return row
    near = get_close_matches(config.architecture, ROWS, 3)
    like = f"; there are {', '.join(near)}" if near else ""
    raise TypeNotSupported(
        f"{config.path}: {config.architecture} is not converted by this version{like}: `quantkit convert --list` shows "
        "all that are"
    )
