"""Baichuan.

Facts of llama.cpp b11434, conversion/baichuan.py.
"""

from __future__ import annotations

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.models import xverse
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Split
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece

#: Baichuan's queries, keys and values are stored in one.
SPLIT_W_PACK = Split(r"\.W_pack\.weight$", (".q_proj.weight", ".k_proj.weight", ".v_proj.weight"), always=True)

_BAICHUAN = Architecture(
    "baichuan", rules=(SPLIT_W_PACK, *xverse.XVERSE_RULES), keys=xverse.XVERSE_KEYS, vocab=write_sentencepiece
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    # convert_hf_to_gguf.py calls itself until it stops, where it means to name a tensor.
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
}


def _set_model_max_length(meta: ModelMetadata, config: Json) -> None:
    """Set the context length by Baichuan's own name, too."""
    config["model_max_length"] = meta.number(".context_length")


#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "BaichuanForCausalLM": HfClass("baichuan", config_setters=(_set_model_max_length,)),
}
