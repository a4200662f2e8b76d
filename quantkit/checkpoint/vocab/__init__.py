"""Vocabularies: the tokenizer of a checkpoint as tokenizer.* keys.

``WRITERS`` names the kinds; each is a function of a ``Vocabulary`` that sets keys, in the order of the class of
convert_hf_to_gguf.py (b11434) that it is named after. A new kind is a function here, or in a file of its own beside
``bpe`` and ``sentencepiece``, and a row in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quantkit.checkpoint.config import optional_json
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.encoders import write_euro_bert, write_jina_bert, write_modern_bert, write_roberta
from quantkit.checkpoint.vocab.families import (
    write_arctic,
    write_deci,
    write_deepseek4,
    write_dream,
    write_gemma,
    write_gemma1,
    write_gemma3n,
    write_gemma4,
    write_internlm3,
    write_jamba,
    write_kimi_k3,
    write_kimi_linear,
    write_laguna,
    write_llada,
    write_mamba,
    write_mamba1,
    write_minimax_m1,
    write_muse,
    write_nemotron,
    write_nemotron_h,
    write_omni,
    write_phi,
    write_sentencepiece_or_bpe,
)
from quantkit.checkpoint.vocab.llama_hf import is_llama_hf, write_llama_hf
from quantkit.checkpoint.vocab.older import (
    write_internlm2,
    write_mpt,
    write_plamo,
    write_plamo3,
    write_qwen,
    write_refact,
    write_rwkv,
    write_xverse,
)
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.special import KINDS, special_tokens
from quantkit.checkpoint.vocab.tekken import write_tekken
from quantkit.checkpoint.vocab.tiktoken import HUNYUAN, KIMI, write_ranks
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.checkpoint.vocab.unigram import write_nomic, write_t5, write_xlm
from quantkit.checkpoint.vocab.wordpiece import write_wordpiece
from quantkit.errors import FormatError


def write_llama(v: Vocabulary) -> None:
    """SentencePiece, Llama's pieces in a tokenizer.json, or BPE: the first that there is (LlamaModel)."""
    if v.has("tekken.json") and not v.has("tokenizer.json"):
        write_tekken(v)
        return
    if v.tokenizer_config.get("add_prefix_space") is not None:
        v.keys.flag("tokenizer.ggml.add_space_prefix", v.tokenizer_config["add_prefix_space"])
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    elif is_llama_hf(v):
        write_llama_hf(v)
    else:
        write_bpe(v)
    size = v.config.get("vocab_size", 32000)
    if size == 32016:  # CodeLlama
        special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "eot"))
        for kind, number in (("prefix", 32007), ("suffix", 32008), ("middle", 32009), ("eot", 32010)):
            special.set(kind, number)
        special.write(v.keys)
    if size == 49152:  # small Granite
        v.keys.flag("tokenizer.ggml.add_bos_token", False)


def write_ernie(v: Vocabulary) -> None:
    """SentencePiece, and whether a space is put before a text (Ernie4_5Model)."""
    write_sentencepiece(v)
    if "add_prefix_space" in v.tokenizer_config:
        v.keys.flag("tokenizer.ggml.add_space_prefix", v.tokenizer_config["add_prefix_space"])


def write_deepseek(v: Vocabulary) -> None:
    """tokenizer.json, else Kimi's ranks (DeepseekV2Model)."""
    if v.has("tokenizer.json") or not v.has(KIMI.file):
        write_bpe(v)
    else:
        write_ranks(v, KIMI)


def write_deepseek_32(v: Vocabulary) -> None:
    """BPE that begins with BOS, which tokenizer_config.json has to say (DeepseekV32Model)."""
    if not v.tokenizer_config.get("add_bos_token", v.class_name == "Llama"):
        raise FormatError(
            f"{v.folder / 'tokenizer_config.json'}: add_bos_token is not true, but texts of this model begin with BOS: "
            "correct it"
        )
    write_bpe(v)


def write_hunyuan_moe(v: Vocabulary) -> None:
    """Hunyuan's ranks, without them tokenizer.json; its config.json names a wrong BOS (HunYuanMoEModel)."""
    if not v.has(HUNYUAN.file):
        write_bpe(v)
        return
    write_ranks(v, HUNYUAN)
    v.keys.u32("tokenizer.ggml.bos_token_id", 127959)


def write_hunyuan(v: Vocabulary) -> None:
    """tokenizer.json, else Hunyuan's ranks; EOS and EOT as the configurations have them (HunYuanModel)."""
    if v.has("tokenizer.json"):
        pad = v.config.outer.get("pad_token_id") or 0
        write_bpe(v, kinds=[kind for kind in KINDS if kind != "pad" or not isinstance(pad, int) or pad >= 0])
    else:
        write_ranks(v, HUNYUAN)
        if v.config.get("hidden_size") == 4096:
            v.keys.u32("tokenizer.ggml.bos_token_id", 127958)
    if (end := v.config.get("eod_token_id")) is not None:
        v.keys.u32("tokenizer.ggml.eos_token_id", end)
    generation = optional_json(v.folder / "generation_config.json") or {}
    ends = generation.get("eos_token_id")
    if isinstance(ends, list) and len(ends) >= 2:
        v.keys.u32("tokenizer.ggml.eot_token_id", ends[0])


_GLM_4 = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>"}
_GLM = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
_CHAT_GLM = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"}
_SOLAR = {"eos": "<|endoftext|>", "eot": "<|endoftext|>", "unk": "<unk>", "bos": "<|startoftext|>"}

WRITERS: dict[str, Callable[[Vocabulary], None]] = {
    "bpe": write_bpe,
    "arctic": write_arctic,
    "deci": write_deci,
    "llada": write_llada,
    "dream": write_dream,
    "muse": write_muse,
    "sentencepiece": write_sentencepiece,
    "sentencepiece or bpe": write_sentencepiece_or_bpe,
    "llama": write_llama,
    "gemma": write_gemma,
    "gemma 1": write_gemma1,
    "gemma 4": write_gemma4,
    "phi": write_phi,
    "mamba": write_mamba,
    "deepseek": write_deepseek,
    "deepseek 3.2": write_deepseek_32,
    "deepseek 4": write_deepseek4,
    "chatglm": partial(write_bpe, special=_CHAT_GLM),
    "gemma 3n": write_gemma3n,
    "jamba": write_jamba,
    "internlm 3": write_internlm3,
    "minimax m1": write_minimax_m1,
    "nemotron": write_nemotron,
    "nemotron h": write_nemotron_h,
    "mamba 1": write_mamba1,
    "kimi k3": write_kimi_k3,
    "omni": write_omni,
    "dots 3": partial(write_bpe, special={"eot": "<|endofassistant|>"}),
    "kimi linear": write_kimi_linear,
    "laguna": write_laguna,
    "ernie": write_ernie,
    "glm 4": partial(write_bpe, special=_GLM_4),
    "glm": partial(write_bpe, special=_GLM),
    "solar": partial(write_bpe, special=_SOLAR),
    "hunyuan": write_hunyuan,
    "hunyuan moe": write_hunyuan_moe,
    "internlm 2": write_internlm2,
    "xverse": write_xverse,
    "qwen": write_qwen,
    "plamo": write_plamo,
    "plamo 3": write_plamo3,
    "refact": write_refact,
    "mpt": write_mpt,
    "rwkv": write_rwkv,
    "t5": write_t5,
    "xlm": write_xlm,
    "wordpiece": write_wordpiece,
    "roberta": write_roberta,
    "nomic": write_nomic,
    "jina bert": write_jina_bert,
    "modern bert": write_modern_bert,
    "euro bert": write_euro_bert,
}
