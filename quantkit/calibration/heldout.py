"""The held-out part of a corpus, and warnings about evaluating on calibration text or calibrating on held-out text.

``quantkit calibration`` writes manifest.json beside its two texts. An importance matrix computed on either keeps
a sketch of the held-out part, quantkit.calibration.heldout.*, and the names of its files, so that every later step can
tell whether that part was calibrated on after all: by name, in a copy, or through a merge.

    calibrated_on      this evaluation text was calibrated on       quantkit perplexity, quantkit kld
    held_out_used      the held-out part was calibrated on          quantkit imatrix, imatrix merge, quantize

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

_PREFIX = f"{CALIBRATION}heldout."
FILES_KEY = f"{_PREFIX}files"
HELD_OUT_KEYS = (*sketch_keys(_PREFIX), FILES_KEY)
#: Notes with this prefix are shown as warnings.
WARNING = "warning: "


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out texts: names, in the order of ``sketch.sha256``, and a sketch of their content."""

    files: tuple[str, ...]
    sketch: Sketch

    def fields(self) -> dict[str, Field]:
        """Return it as metadata of a GGUF, for Imatrix.extra."""
        names = Field.of(FILES_KEY, list(self.files), ValueType.ARRAY, ValueType.STRING)
        return {**self.sketch.fields(_PREFIX), FILES_KEY: names}


def held_out_beside(path: Path, raw: bytes) -> HeldOut | None:
    """Return what was held out of the corpus that a text, file ``path`` with bytes ``raw``, belongs to.

    None unless the manifest beside the text lists its hash. The held-out text itself need not exist any more: the
    manifest has its hash.
    """
    manifest = _manifest(path.parent / MANIFEST)
    parts = [manifest.get(part) for part in ("calibration", "evaluation")]
    if not all(isinstance(p, dict) and isinstance(p.get("sha256"), str) for p in parts):
        return None
    chosen, held_out = parts
    assert chosen is not None
    assert held_out is not None
    digest = hashlib.sha256(raw).hexdigest()
    if digest not in (chosen["sha256"], held_out["sha256"]) or not held_out.get("bytes"):
        return None
    # Only the name: the file must be in this folder.
    file = path.parent / Path(str(held_out.get("file"))).name
    text = raw if digest == held_out["sha256"] else _bytes(file)
    made = None if text is None else sketch(text)
    if made is None or made.sha256 != (held_out["sha256"],):
        made = replace(sketch(b""), sha256=(held_out["sha256"],))
    return HeldOut((str(file),), made)


def _manifest(path: Path) -> dict[str, Any]:
    raw = _bytes(path)
    try:
        found = json.loads(raw) if raw is not None else None
    except ValueError:
        return {}  # some other manifest.json
    return found if isinstance(found, dict) and found.get("made_by") == "quantkit calibration" else {}


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def held_out_of(path: Path, metadata: Mapping[str, Field]) -> HeldOut | None:
    """Return what the metadata of ``path`` record as held out, None without a record. Raises FormatError."""
    found, files = read_sketch(path, metadata, _PREFIX), metadata.get(FILES_KEY)
    if found is None or files is None:
        return None
    if files.item_type is not ValueType.STRING or len(files.value) != len(found.sha256):
        raise FormatError(f"{path}: the keys {_PREFIX}* are not as quantkit writes them")
    return HeldOut(tuple(files.value), found)


def merge_held_out(parts: Sequence[HeldOut]) -> HeldOut | None:
    """Return what several corpora held out together, None if nothing."""
    if not parts:
        return None
    names = {digest: file for part in parts for digest, file in zip(part.sketch.sha256, part.files, strict=True)}
    merged = merge_sketches([part.sketch for part in parts])
    return HeldOut(tuple(names[digest] for digest in merged.sha256), merged)


# ---------------------------------------------------------------- warnings


def calibrated_on(path: Path, metadata: Mapping[str, Field], text: str | bytes) -> str | None:
    """Return the warning that a model's metadata show ``text`` as calibrated on, or None."""
    known = read_sketch(path, metadata)
    found = overlap(text, known).warning if known is not None else None
    return None if found is None else WARNING + found


def held_out_used(path: Path, metadata: Mapping[str, Field]) -> str | None:
    """Return the warning that held-out text was calibrated on, naming it, or None."""
    held_out, known = held_out_of(path, metadata), read_sketch(path, metadata)
    if held_out is None or known is None:
        return None
    found = overlap(held_out.sketch, known)
    if found.warning is None:
        return None
    named = [
        file for digest, file in zip(held_out.sketch.sha256, held_out.files, strict=True) if digest in known.sha256
    ]
    what = "" if named else f"about {100 * found.share:.0f} % of "
    return (
        f"{WARNING}{path} was computed on {what}{', '.join(named or held_out.files)}, held out by quantkit calibration:"
        " results on that text will look better than they are; calibrate on the corpus's other part, or evaluate on"
        " another text"
    )
