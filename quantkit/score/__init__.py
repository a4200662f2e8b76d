"""Multiple-choice tasks: the accuracy of a model, and the paired difference of two.

files      HellaSwag, WinoGrande and multiple-choice files of llama-perplexity; requests of lm-evaluation-harness
order      the tasks that llama-perplexity selects, in its order
tokens     the tokens of choices, and which of them are scored
likelihood log-likelihoods of choices, computed with shared prompts
accuracy   accuracy, flips, McNemar's test, intervals
answers    ``quantkit.score``: the answers of a model
"""

from __future__ import annotations

from quantkit.score.accuracy import Accuracy, PairedAccuracy, compare_accuracies
from quantkit.score.answers import ScoreProgress, TaskScores, score

__all__ = ["Accuracy", "PairedAccuracy", "ScoreProgress", "TaskScores", "compare_accuracies", "score"]
