"""Vocabularies of single families: those of ``sentencepiece``, ``llama_hf`` and ``bpe`` with what is their own."""

from __future__ import annotations

from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.llama_hf import is_llama_hf, llama_hf_tokens, write_llama_hf
from quantkit.checkpoint.vocab.sentencepiece import (
    Piece,
    phi_tokens,
    plain_tokens,
    sentencepiece_tokens,
    set_pieces,
    write_pieces,
    write_sentencepiece,
)
from quantkit.checkpoint.vocab.special import special_tokens, template_file
from quantkit.checkpoint.vocab.tiktoken import KIMI, write_ranks
from quantkit.checkpoint.vocab.tokenizer import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, checked_size
from quantkit.errors import FormatError

#: Tokens of Gemma 4 that a chat's parser must see.
_VISIBLE = frozenset(
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
)


def write_sentencepiece_or_bpe(v: Vocabulary) -> None:
    """tokenizer.model if there is one, else tokenizer.json (Qwen2Model)."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    else:
        write_bpe(v)


def write_gemma(v: Vocabulary) -> None:
    """SentencePiece without a space put before texts (Gemma2Model); Gemma 3 may have a tokenizer.json only."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
        v.keys.flag("tokenizer.ggml.add_space_prefix", False)
    else:
        write_bpe(v)


def write_gemma1(v: Vocabulary) -> None:
    """SentencePiece, with the tokens of CodeGemma (GemmaModel)."""
    write_sentencepiece(v)
    special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "fsep", "eot"))
    special.set("eot", 107)
    special.template = None
    special.write(v.keys)
    v.keys.flag("tokenizer.ggml.add_space_prefix", False)


def write_gemma4(v: Vocabulary) -> None:
    """Llama's pieces with their merges (Gemma4Model)."""
    if not is_llama_hf(v):
        raise FormatError(f"{v.where}: a tokenizer of Gemma 4 is BPE of pieces, with bytes to fall back on")
    tokens = llama_hf_tokens(v)
    v.keys.text("tokenizer.ggml.model", "gemma4")
    v.keys.array("tokenizer.ggml.tokens", [piece.text for piece in tokens])
    v.keys.array("tokenizer.ggml.scores", [piece.score for piece in tokens])
    types = [USER_DEFINED if piece.text in _VISIBLE else piece.type for piece in tokens]
    v.keys.array("tokenizer.ggml.token_type", types)
    special_tokens(v.folder, merges=True).write(v.keys)
    v.keys.flag("tokenizer.ggml.add_space_prefix", False)
    v.keys.flag("tokenizer.ggml.add_bos_token", True)


def write_phi(v: Vocabulary) -> None:
    """Phi 4 has a BPE vocabulary, others SentencePiece (Phi3MiniModel)."""
    if v.tokenizer_config.get("tokenizer_class") == "GPT2Tokenizer" or not v.has("tokenizer.model"):
        write_bpe(v)
    else:
        write_pieces(v, phi_tokens(v))


def write_mamba(v: Vocabulary) -> None:
    """Either kind, filled up to a multiple of pad_vocab_size_multiple tokens (Mamba2Model)."""
    size, of = v.config["vocab_size"], v.config.get("pad_vocab_size_multiple", 16)
    if not isinstance(of, int) or isinstance(of, bool) or of < 1:
        raise FormatError(f"{v.config.path}: pad_vocab_size_multiple is {of!r}")
    v.config.values["vocab_size"] = -(checked_size(v, size, 0) // -of) * of
    write_sentencepiece_or_bpe(v)


def write_kimi_linear(v: Vocabulary) -> None:
    """tokenizer.json, else Kimi's ranks, and the end of texts that the tokenizer names (KimiLinearModel)."""
    if v.has("tokenizer.json") or not v.has(KIMI.file):
        write_bpe(v)
        return
    write_ranks(v, KIMI)
    end = v.tokenizer_config.get("eos_token")
    numbers = [number for number, entry in v.listed if entry["content"] == end]
    if not numbers:
        raise FormatError(f"{v.folder / 'tokenizer_config.json'}: its eos_token is none of its added tokens")
    v.keys.u32("tokenizer.ggml.eos_token_id", numbers[0])


def write_laguna(v: Vocabulary) -> None:
    """BPE; what ends an assistant's turn is a token for control (LagunaModel)."""
    write_bpe(v)
    tokens, types = (list(v.keys.fields[f"tokenizer.ggml.{key}"].value) for key in ("tokens", "token_type"))
    turned = [CONTROL if text == "</assistant>" else kind for text, kind in zip(tokens, types, strict=True)]
    v.keys.array("tokenizer.ggml.token_type", turned)
    if v.has("chat_template.jinja"):
        v.keys.text("tokenizer.chat_template", template_file(v.folder))
    ends, bos = v.config.get("eos_token_id"), v.config.get("bos_token_id")
    if isinstance(ends, list) and (others := [end for end in ends if end != bos]):
        v.keys.u32("tokenizer.ggml.eot_token_id", others[0])


def write_nemotron(v: Vocabulary) -> None:
    """SentencePiece, of which no file says what pads (NemotronModel)."""
    write_sentencepiece(v)
    v.keys.u32("tokenizer.ggml.padding_token_id", 0)
    v.keys.u32("tokenizer.ggml.unknown_token_id", 1)


def write_omni(v: Vocabulary) -> None:
    """BPE; texts begin and end with the end of a turn (Qwen3OmniMoeTextModel)."""
    write_bpe(v)
    number = next((number for number, entry in v.listed if entry["content"] == "<|im_end|>"), None)
    if number is not None:
        v.keys.u32("tokenizer.ggml.bos_token_id", number)
        v.keys.u32("tokenizer.ggml.eos_token_id", number)


def write_kimi_k3(v: Vocabulary) -> None:
    """As Kimi Linear's, but texts end where the configuration says (KimiK3Model)."""
    write_kimi_linear(v)
    if (end := v.config.get("eos_token_id")) is not None:
        v.keys.u32("tokenizer.ggml.eos_token_id", end)


def write_nemotron_h(v: Vocabulary) -> None:
    """BPE, filled up to a multiple of eight tokens (NemotronHModel)."""
    v.config.values["vocab_size"] = -(checked_size(v, v.config["vocab_size"], 0) // -8) * 8
    write_bpe(v)


def write_mamba1(v: Vocabulary) -> None:
    """tokenizer.json, else SentencePiece, filled up to a multiple of pad_vocab_size_multiple tokens (MambaModel)."""
    size, of = v.config["vocab_size"], v.config.get("pad_vocab_size_multiple", 8)
    if not isinstance(of, int) or isinstance(of, bool) or of < 1:
        raise FormatError(f"{v.config.path}: pad_vocab_size_multiple is {of!r}")
    v.config.values["vocab_size"] = -(checked_size(v, size, 0) // -of) * of
    if v.has("tokenizer.json") or not v.has("tokenizer.model"):
        write_bpe(v)
    else:
        write_sentencepiece(v)


def write_gemma3n(v: Vocabulary) -> None:
    """As Gemma's, of all tokens, also those that have no embeddings of each layer (Gemma3NModel)."""
    v.config = v.config.without("vocab_size_per_layer_input")
    write_gemma(v)


def write_jamba(v: Vocabulary) -> None:
    """SentencePiece, or Llama's pieces in a tokenizer.json without a space put before texts (JambaModel)."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    else:
        write_llama_hf(v)
        v.keys.flag("tokenizer.ggml.add_space_prefix", False)


def write_minimax_m1(v: Vocabulary) -> None:
    """BPE; chat_template.jinja counts, if there is one.

    Without one the reference writes a template of llama.cpp's own, we that of the tokenizer (MiniMaxText01Model).
    """
    write_bpe(v)
    if v.has("chat_template.jinja"):
        v.keys.text("tokenizer.chat_template", template_file(v.folder))


def write_internlm3(v: Vocabulary) -> None:
    """SentencePiece; the end of a turn ends a text (InternLM3Model)."""
    tokens = sentencepiece_tokens(v)
    set_pieces(v, tokens)
    special = special_tokens(v.folder, n_tokens=len(tokens))
    if "add_prefix_space" in v.tokenizer_config:
        v.keys.flag("tokenizer.ggml.add_space_prefix", v.tokenizer_config["add_prefix_space"])
    for number, entry in v.listed:
        if entry.get("special") and entry["content"] == "<|im_end|>" and "eos" in special.ids:
            special.ids["eos"] = number
    special.write(v.keys)


def write_arctic(v: Vocabulary) -> None:
    """SentencePiece, in which tokenizer_config.json gives tokens other names (ArcticModel)."""
    tokens, unknown = plain_tokens(v), v.tokenizer_config.get("unk_token")
    for number, entry in v.listed:
        if number < len(tokens):
            text = entry["content"]
            kind = (UNKNOWN if text == unknown else CONTROL) if entry.get("special") else USER_DEFINED
            tokens[number] = Piece(text, 0.0 if entry.get("special") else -10000.0, kind)
    write_pieces(v, tokens)


def write_deci(v: Vocabulary) -> None:
    """BPE of as many tokens as Llama 3 has, else Llama's pieces in a tokenizer.json (DeciModel)."""
    if v.config.get("vocab_size", 128256) == 128256:
        write_bpe(v)
    else:
        write_llama_hf(v)


def write_llada(v: Vocabulary) -> None:
    """BPE that begins with BOS (LLaDAModel)."""
    write_bpe(v, as_listed=True)
    v.keys.flag("tokenizer.ggml.add_bos_token", True)


def write_dream(v: Vocabulary) -> None:
    """SentencePiece, else BPE (DreamModel)."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
    else:
        write_bpe(v, as_listed=True)


def write_muse(v: Vocabulary) -> None:
    """BPE, with the end of a turn (MuseGlimmerModel)."""
    write_bpe(v)
    if (end := next((number for number, text in v.by_id.items() if text == "<|eot|>"), None)) is not None:
        v.keys.u32("tokenizer.ggml.eot_token_id", end)


def write_deepseek4(v: Vocabulary) -> None:
    """BPE. Without a chat template the reference writes one of llama.cpp's own, we none (DeepseekV4Model)."""
    write_bpe(v)
    if v.keys.fields["tokenizer.chat_template"].value == "-":
        v.keys.remove("tokenizer.chat_template")
