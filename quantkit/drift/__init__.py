"""The drift of embeddings between two files of a model, text by text and among neighbours.

texts.py       a file's lines or paragraphs
statistics.py  cosines, rank correlation of similarities, equal neighbours, with their intervals
compare.py     the verb ``drift``
"""

from __future__ import annotations

from quantkit.drift.compare import Drift, drift
from quantkit.drift.texts import read_texts

__all__ = ["Drift", "drift", "read_texts"]
