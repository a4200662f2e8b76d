"""Texts of a cook: for calibration, for sensitivity and for the check; no two share a passage.

A search overfits to the text of the sensitivities, so its files are checked on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.calibration import calibration
from quantkit.cook.config import TextSettings
from quantkit.cook.engine import Facts, StepProgress
from quantkit.errors import FormatError
from quantkit.formats.outputs import atomic_write, read_text

#: Share of the held-out text that sensitivity is measured on.
_SENSITIVITY_SHARE = 0.4


def make_texts(settings: TextSettings, folder: Path, sensitivity: Path, check: Path, progress: StepProgress) -> Facts:
    """Write the texts of sensitivity and check; without an evaluation text also the corpus, to ``folder``."""
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
            progress.note(note)
        held_out = corpus.evaluation.text.encode()
    parts = split_text(held_out, _SENSITIVITY_SHARE)
    if not all(parts):
        raise FormatError("[calibration] the evaluation text is too short to split: give more text", "QK-E121")
    for path, part in zip((sensitivity, check), parts, strict=True):
        with atomic_write(path) as file:
            file.write_bytes(part)
    return {"sensitivity_bytes": len(parts[0]), "check_bytes": len(parts[1])}


def split_text(text: bytes, share: float) -> tuple[bytes, bytes]:
    """Return both parts of a text, cut after a blank line, a line or a word, close before ``share`` of its length."""
    position = int(len(text) * share)
    for gap in (b"\n\n", b"\n", b" "):
        start = text.rfind(gap, position // 2, position)
        if start >= 0:
            return text[: start + len(gap)], text[start + len(gap) :]
    while position < len(text) and text[position] & 0xC0 == 0x80:  # not within a character of UTF-8
        position += 1
    return text[:position], text[position:]


def text_inputs(label: str, paths: Sequence[Path]) -> dict[str, Path]:
    """Return texts as inputs of a step, numbered if there are several."""
    if len(paths) == 1:
        return {label: paths[0]}
    return {f"{label} {number}": path for number, path in enumerate(paths, 1)}
