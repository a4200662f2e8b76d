"""The held-out part of a corpus, and warnings about evaluating on calibration text or calibrating on held-out text.

``quantkit calibration`` writes manifest.json beside its two texts. An importance matrix computed on either stores a
sketch of the held-out part, quantkit.calibration.heldout.*, and the names of its files, so that later steps detect
whether that part was calibrated on: by name, in a copy, or through a merge. The texts of ``quantkit texts`` are held
out by themselves.

    calibration_warning   this evaluation text was calibrated on     quantkit perplexity, quantkit kld
    held_out_warning      the held-out part was calibrated on        quantkit imatrix, imatrix merge, quantize

Both take the metadata of an importance matrix, or of a model quantized with one, which keeps these keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.calibration.corpus import MANIFEST
from quantkit.calibration.overlap import CALIBRATION, Sketch, merge_sketches, overlap, read_sketch, sketch, sketch_keys
from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.outputs import read_whole
from quantkit.texts import is_in_set

_PREFIX = f"{CALIBRATION}heldout."
FILES_KEY = f"{_PREFIX}files"
HELD_OUT_KEYS = (*sketch_keys(_PREFIX), FILES_KEY)
#: Notes with this prefix are shown as warnings.
WARNING = "warning: "


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out texts: file names in the order of ``sketch.sha256``, and a sketch of their content."""

    files: tuple[str, ...]
    sketch: Sketch

    def fields(self) -> dict[str, Field]:
        """Return it as metadata of a GGUF, for Imatrix.extra."""
        names = Field.of(FILES_KEY, list(self.files), ValueType.ARRAY, ValueType.STRING)
        return {**self.sketch.fields(_PREFIX), FILES_KEY: names}


def find_held_out(path: Path, raw: bytes, rendering: bytes | None = None) -> HeldOut | None:
    """Return the held-out part of the corpus of a text: file ``path`` with bytes ``raw``.

    None unless the manifest beside the text lists its hash. The held-out text itself need not exist: the manifest has
    its hash. A text of ``quantkit texts`` is held out itself; ``rendering``: of its conversations by a chat template.
    """
    if is_in_set(raw):
        return HeldOut((str(path),), sketch(raw if rendering is None else rendering))
    manifest = _manifest(path.parent / MANIFEST)
    parts = [manifest.get(part) for part in ("calibration", "evaluation")]
    if not all(isinstance(p, dict) and isinstance(p.get("sha256"), str) for p in parts):
        return None
    calibration, held_out = parts
    assert calibration is not None
    assert held_out is not None
    digest = hashlib.sha256(raw).hexdigest()
    if digest not in (calibration["sha256"], held_out["sha256"]) or not held_out.get("bytes"):
        return None
    # Only the name: the file must be in this folder.
    file = path.parent / Path(str(held_out.get("file"))).name
    text = raw if digest == held_out["sha256"] else _bytes(file)
    content = None if text is None else sketch(text)
    if content is None or content.sha256 != (held_out["sha256"],):
        content = replace(sketch(b""), sha256=(held_out["sha256"],))
    return HeldOut((str(file),), content)


def _manifest(path: Path) -> dict[str, Any]:
    raw = _bytes(path)
    try:
        manifest = json.loads(raw) if raw is not None else None
    except (ValueError, RecursionError):
        return {}  # an unrelated manifest.json
    return manifest if isinstance(manifest, dict) and manifest.get("made_by") == "quantkit calibration" else {}


def _bytes(path: Path) -> bytes | None:
    try:
        return read_whole(path) if path.is_file() else None
    except FormatError:
        return None


def read_held_out(path: Path, metadata: Mapping[str, Field]) -> HeldOut | None:
    """Return the held-out texts that metadata of ``path`` record, None without a record. Raises FormatError."""
    content, files = read_sketch(path, metadata, _PREFIX), metadata.get(FILES_KEY)
    if content is None or files is None:
        return None
    if files.item_type is not ValueType.STRING or len(files.value) != len(content.sha256):
        raise FormatError(f"{path}: the keys {_PREFIX}* are malformed", "QK-E118")
    return HeldOut(tuple(files.value), content)


def merge_held_out(parts: Sequence[HeldOut]) -> HeldOut | None:
    """Return the held-out texts of several corpora, None for none."""
    if not parts:
        return None
    names = {digest: file for part in parts for digest, file in zip(part.sketch.sha256, part.files, strict=True)}
    merged = merge_sketches([part.sketch for part in parts])
    return HeldOut(tuple(names[digest] for digest in merged.sha256), merged)


# ---------------------------------------------------------------- warnings


def calibration_warning(path: Path, metadata: Mapping[str, Field], text: str | bytes) -> str | None:
    """Return a warning if a model's metadata show that ``text`` was calibrated on, or None."""
    calibration = read_sketch(path, metadata)
    warning = overlap(text, calibration).warning if calibration is not None else None
    return None if warning is None else WARNING + warning


def held_out_warning(path: Path, metadata: Mapping[str, Field]) -> str | None:
    """Return a warning, with file names, if held-out text was calibrated on, or None."""
    held_out, calibration = read_held_out(path, metadata), read_sketch(path, metadata)
    if held_out is None or calibration is None:
        return None
    shared = overlap(held_out.sketch, calibration)
    if shared.warning is None:
        return None
    names = [
        file
        for digest, file in zip(held_out.sketch.sha256, held_out.files, strict=True)
        if digest in calibration.sha256
    ]
    portion = "" if names else f"about {100 * shared.share:.0f} % of "
    return (
        f"{WARNING}{path} was computed on {portion}{', '.join(names or held_out.files)}, which is held out for "
        "evaluation: results on that text will look too good; calibrate on another text, or evaluate on another"
    )
