"""Vocabularies of encoders: WordPiece, byte-level BPE, with what is their own."""

from __future__ import annotations

from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tokenizer import NORMAL, USER_DEFINED, Vocabulary
from quantkit.checkpoint.vocab.wordpiece import set_token_types, write_wordpiece
from quantkit.errors import FormatError


def write_roberta(v: Vocabulary) -> None:
    """BPE of a tokenizer.json; without one, its tokens as pieces of words (RobertaModel)."""
    if v.has("tokenizer.json"):
        write_bpe(v)
        set_token_types(v)
    else:
        write_wordpiece(v)


def write_nomic_words(v: Vocabulary) -> None:
    """WordPiece, as its tokenizer.json says (NomicBertModel)."""
    kind = v.model.get("type")
    if kind != "WordPiece":
        raise FormatError(f"{v.where}: its model is {kind!r}, but that of this class is WordPiece or Unigram")
    write_wordpiece(v)


def write_jina_bert(v: Vocabulary) -> None:
    """BERT's or RoBERTa's, as tokenizer_config.json names it (JinaBertV2Model)."""
    name = v.tokenizer_config.get("tokenizer_class")
    if name == "BertTokenizer":
        write_wordpiece(v)
        return
    split = v.json.get("pre_tokenizer") or {}
    if name != "RobertaTokenizer" or split.get("type") == "Whitespace":
        raise FormatError(
            f"{v.folder / 'tokenizer_config.json'}: its tokenizer is {name!r}"
            f"{' and splits at spaces' if name == 'RobertaTokenizer' else ''}; of this class BertTokenizer is known, "
            "and RobertaTokenizer of bytes"
        )
    write_bpe(v)
    v.keys.u32("tokenizer.ggml.token_type_count", 2)


def write_modern_bert(v: Vocabulary) -> None:
    """BPE with something before, between and behind texts (ModernBertModel)."""
    for kind in ("bos", "eos", "sep"):
        v.keys.flag(f"tokenizer.ggml.add_{kind}_token", True)
    write_bpe(v)
    if v.pre_name == "mmbert":
        _normal_spaces(v)


def _normal_spaces(v: Vocabulary) -> None:
    """Make added tokens of spaces normal ones: they are never found in a text."""
    tokens, types = (list(v.keys.fields[f"tokenizer.ggml.{key}"].value) for key in ("tokens", "token_type"))
    for i, text in enumerate(tokens):
        if types[i] == USER_DEFINED and text and not text.strip(" "):
            tokens[i], types[i] = "\u2581" * len(text), NORMAL
    v.keys.array("tokenizer.ggml.tokens", tokens)
    v.keys.array("tokenizer.ggml.token_type", types)


def write_euro_bert(v: Vocabulary) -> None:
    """BPE with nothing before texts (EuroBertModel)."""
    v.keys.flag("tokenizer.ggml.add_bos_token", False)
    write_bpe(v)
