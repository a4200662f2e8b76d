"""Quality of a file: perplexity, KL divergence from a base model, logits.

The methods are llama-perplexity's (llama.cpp b11434 tools/perplexity): chunks of n_ctx tokens, BOS in place of the
first token of each, the second half scored, so that every scored token has a context of at least n_ctx / 2. Equal
logits give equal figures; deviations are documented where they occur.

    perplexity  exp(mean negative log-likelihood) of a text; optionally writes all logits as a base
    kld         divergence of a model from the base: all statistics of llama-perplexity --kl-divergence
    logits      the model's logits for some tokens

    perplexity_of_texts  perplexities of several texts and conversations
    kld_of_texts         divergences of a model on several texts, from the base logits of each
    compare_models       divergences of several models from a base model, which is computed once
"""

from __future__ import annotations

from quantkit.evaluate.by_base import TextKlds, kld_of_texts
from quantkit.evaluate.by_text import TextPerplexities, TextsProgress, perplexity_of_texts
from quantkit.evaluate.compare import ComparisonProgress, compare_models
from quantkit.evaluate.comparison import Comparison, ModelDivergence
from quantkit.evaluate.divergence import Kld, KldProgress, kld
from quantkit.evaluate.likelihood import Perplexity, PerplexityProgress, perplexity
from quantkit.evaluate.output import logits
from quantkit.evaluate.passes import Nodes
from quantkit.evaluate.sinks import SaveLogits
from quantkit.evaluate.statistics import Distribution, Estimate, KldSums, NllSums
from quantkit.evaluate.texts import Texts

__all__ = [
    "Comparison",
    "ComparisonProgress",
    "Distribution",
    "Estimate",
    "Kld",
    "KldProgress",
    "KldSums",
    "ModelDivergence",
    "NllSums",
    "Nodes",
    "Perplexity",
    "PerplexityProgress",
    "SaveLogits",
    "TextKlds",
    "TextPerplexities",
    "Texts",
    "TextsProgress",
    "compare_models",
    "kld",
    "kld_of_texts",
    "logits",
    "perplexity",
    "perplexity_of_texts",
]
