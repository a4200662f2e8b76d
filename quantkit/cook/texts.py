"""The texts of a cook: one to calibrate on, one to measure sensitivity on, one to check on; no two share a passage.

A search takes what is best on its text, so its files are checked on another: what they gain there is real.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.calibration import calibration
from quantkit.cook.config import TextSettings
from quantkit.cook.engine import Facts, Tell
from quantkit.errors import FormatError
from quantkit.formats.outputs import read_text, written

#: The share of the held-out text that sensitivity is measured on.
_SENSITIVITY = 0.4


def make_texts(settings: TextSettings, folder: Path, sensitivity: Path, check: Path, tell: Tell) -> Facts:
    """Write the texts to measure on, and, if nothing is held out yet, the corpus they are a part of, to ``folder``."""
    if settings.evaluation is not None:
        held_out = read_text(settings.evaluation)
    else:
        corpus = calibration(
            [str(path) for path in settings.text],
            folder,
            size=settings.size,
            heldout=settings.heldout,
            seed=settings.seed,
            include=settings.include,
            overwrite=True,
        )
        for note in corpus.notes:
            tell.note(note)
        held_out = corpus.evaluation.text.encode()
        if not held_out:
            raise FormatError(
                "[calibration] too little text to hold a part of it out: give more text, or an evaluation text"
            )
    parts = divided(held_out, _SENSITIVITY)
    if not all(parts):
        raise FormatError("[calibration] the evaluation text is too short to be divided: give more text")
    for path, part in zip((sensitivity, check), parts, strict=True):
        with written(path) as made:
            made.write_bytes(part)
    return {"sensitivity_bytes": len(parts[0]), "check_bytes": len(parts[1])}


def divided(text: bytes, share: float) -> tuple[bytes, bytes]:
    """Return both parts of a text, cut behind a blank line, or a line, or a word, near ``share`` of its length."""
    at = int(len(text) * share)
    for gap in (b"\n\n", b"\n", b" "):
        found = text.rfind(gap, at // 2, at)
        if found >= 0:
            return text[: found + len(gap)], text[found + len(gap) :]
    while at < len(text) and text[at] & 0xC0 == 0x80:  # not within a character of UTF-8
        at += 1
    return text[:at], text[at:]


def text_inputs(label: str, paths: Sequence[Path]) -> dict[str, Path]:
    """Return texts as the inputs of a step."""
    if len(paths) == 1:
        return {label: paths[0]}
    return {f"{label} {number}": path for number, path in enumerate(paths, 1)}
