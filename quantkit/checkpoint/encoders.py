"""More rows of the table of architectures: encoders, which make embeddings, and T5.

Facts of llama.cpp b11434, conversion/bert.py and conversion/t5.py; see architectures.py, which has the others.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.checkpoint.families import bert, t5
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensors import Dropped, Renamed

_BERT = Architecture("bert", stored=bert.STORED, rules=(bert.HEAD,), keys=bert.KEYS, vocab="wordpiece")
_DISTIL_BERT = replace(
    _BERT,
    stored=(Renamed(r"^distilbert\.", ""), Dropped(r"^vocab_"), *bert.STORED),
    base=bert.set_distil_base,
)
_ROBERTA = replace(
    _BERT,
    stored=(Renamed(r"^roberta\.", ""), *bert.STORED),
    rules=(bert.POSITIONS, bert.HEAD),
    vocab="roberta",
    prepare=bert.cut_positions,
)
_NOMIC_BERT = replace(_BERT, arch="nomic-bert", stored=bert.NOMIC_STORED, vocab="nomic", prepare=bert.prepare_nomic)
_NOMIC_BERT_MOE = replace(
    _NOMIC_BERT,
    arch="nomic-bert-moe",
    rules=(*bert.NOMIC_EXPERTS, bert.HEAD),
    keys=(*bert.KEYS, *bert.NOMIC_EXPERT_KEYS),
)
_JINA_BERT = replace(_BERT, arch="jina-bert-v2", vocab="jina bert")
_NEO_BERT = replace(
    _BERT,
    arch="neo-bert",
    stored=(Dropped(r"^decoder\."), Renamed(r"^model\.", ""), *bert.STORED),
    keys=(*bert.KEYS, bert.set_neo),
)
_MODERN_BERT = replace(
    _BERT,
    arch="modern-bert",
    stored=(Renamed(r"^model\.", ""), *bert.STORED),
    keys=(*bert.KEYS, *bert.MODERN_KEYS),
    vocab="modern bert",
)
_EURO_BERT = Architecture("eurobert", stored=(Renamed(r"^model\.", ""),), keys=bert.EURO_KEYS, vocab="euro bert")
_XLM = replace(_ROBERTA, vocab="xlm", prepare=bert.prepare_xlm)
_T5 = Architecture("t5", rules=t5.RULES, base=t5.set_base, vocab="t5")

#: Class of transformers -> how it is converted.
ENCODERS: dict[str, Architecture] = {
    **dict.fromkeys(("BertModel", "CamembertModel", "BertForMaskedLM", "BertForSequenceClassification"), _BERT),
    **dict.fromkeys(("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification"), _DISTIL_BERT),
    **dict.fromkeys(("RobertaModel", "RobertaForSequenceClassification"), _ROBERTA),
    "NomicBertModel": replace(
        _NOMIC_BERT, instead=lambda config: _NOMIC_BERT_MOE if bert.has_experts(config) else None
    ),
    **dict.fromkeys(("JinaBertModel", "JinaBertForMaskedLM"), _JINA_BERT),
    **dict.fromkeys(("NeoBERT", "NeoBERTLMHead", "NeoBERTForSequenceClassification"), _NEO_BERT),
    **dict.fromkeys(("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"), _MODERN_BERT),
    **dict.fromkeys(("EuroBertModel", "JinaEmbeddingsV5Model"), _EURO_BERT),
    **dict.fromkeys(("XLMRobertaModel", "XLMRobertaForSequenceClassification"), _XLM),
    **dict.fromkeys(("T5ForConditionalGeneration", "T5WithLMHeadModel", "MT5ForConditionalGeneration"), _T5),
    **dict.fromkeys(("UMT5ForConditionalGeneration", "UMT5Model"), _T5),
    "T5EncoderModel": replace(_T5, arch="t5encoder"),
}
