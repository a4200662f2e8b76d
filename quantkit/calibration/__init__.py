"""Calibration text: built from local files with a held-out part, and recognized when it is used for evaluation.

corpus      builds calibration.txt, evaluation.txt and manifest.json
documents   reads texts, code and JSON Lines
passages    splits documents into passages and drops repetitions
overlap     sketches of texts, and the overlap of two
heldout     warnings about evaluating on calibration text, and about calibrating on held-out text
"""

from __future__ import annotations

from quantkit.calibration.corpus import Corpus, Part, calibration, sketch_file
from quantkit.calibration.heldout import HeldOut, calibration_warning, find_held_out, held_out_warning, read_held_out
from quantkit.calibration.overlap import Overlap, Sketch, merge_sketches, overlap, sketch, sketch_of

__all__ = [
    "Corpus",
    "HeldOut",
    "Overlap",
    "Part",
    "Sketch",
    "calibration_warning",
    "calibration",
    "find_held_out",
    "read_held_out",
    "held_out_warning",
    "merge_sketches",
    "overlap",
    "sketch",
    "sketch_file",
    "sketch_of",
]
