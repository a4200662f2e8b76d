"""Calibration text: built from local files, with a held-out part, and recognized when it turns up in evaluation.

calibration   builds calibration.txt, evaluation.txt and manifest.json
sketch        what an importance matrix records of the text it was computed on
overlap       how much of an evaluation text was calibrated on
heldout.py    warnings about that, and about calibrating on held-out text
"""

from __future__ import annotations

from quantkit.calibration.corpus import Corpus, Part, calibration, sketch_file
from quantkit.calibration.heldout import HeldOut, calibrated_on, held_out_beside, held_out_of, held_out_used
from quantkit.calibration.overlap import Overlap, Sketch, merge_sketches, overlap, sketch, sketch_of

__all__ = [
    "Corpus",
    "HeldOut",
    "Overlap",
    "Part",
    "Sketch",
    "calibrated_on",
    "calibration",
    "held_out_beside",
    "held_out_of",
    "held_out_used",
    "merge_sketches",
    "overlap",
    "sketch",
    "sketch_file",
    "sketch_of",
]
