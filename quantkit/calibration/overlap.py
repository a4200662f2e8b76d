"""Sketches of calibration texts, from which a later overlap check needs no text.

A *shingle* is eight words in a row, ignoring case and punctuation; a Chinese, Japanese or Korean character is a word.
A sketch has the hashes of a text's shingles below 2^64 / scale, about one in ``scale``: a shingle is in every sketch or
in none, so for two sketches

    overlap(evaluation, calibration) = | hashes in both | / | hashes of the evaluation |

estimates the share of the evaluation's shingles that the calibration text has (FracMinHash). The sketch of a megabyte
is 10 000 hashes, 80 KB: small enough for the metadata of an importance matrix, quantkit.calibration.*, where quantize
and perplexity find it. It detects shared passages, not shared sentences.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.imatrix import Imatrix

U64Array = npt.NDArray[np.uint64]

#: Number of words of a shingle.
WORDS = 8
#: A sketch contains one of this number of shingles.
SCALE = 16
#: Maximum number of hashes of a sketch; larger ones are thinned by a larger scale.
MAX_HASHES = 1 << 16
#: Below this share, or with fewer common hashes than this, an overlap is chance or common phrases.
NOTABLE, NOTABLE_HASHES = 0.02, 4

#: Prefix of a sketch's keys.
CALIBRATION = "quantkit.calibration."


def sketch_keys(prefix: str = CALIBRATION) -> tuple[str, str, str]:
    """Return the keys of a sketch: scale, shingles, sha256."""
    return f"{prefix}scale", f"{prefix}shingles", f"{prefix}sha256"


SKETCH_KEYS = sketch_keys()

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
#: Odd constants: the base of a polynomial modulo 2^64, and splitmix64's mixing.
_BASE = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True, eq=False)
class Sketch:
    """A sketch of one text, or of several."""

    scale: int
    #: uint64, sorted, unique.
    hashes: U64Array
    #: SHA-256 of each text, hex; of a whole file, as printed by sha256sum and recorded in a manifest.
    sha256: tuple[str, ...]

    def fields(self, prefix: str = CALIBRATION) -> dict[str, Field]:
        """Return the sketch as metadata of a GGUF, for Imatrix.extra."""
        scale, shingles, sha256 = sketch_keys(prefix)
        items = (
            Field.of(scale, self.scale, ValueType.UINT32),
            Field.of(shingles, self.hashes, ValueType.ARRAY, ValueType.UINT64),
            Field.of(sha256, list(self.sha256), ValueType.ARRAY, ValueType.STRING),
        )
        return {item.key: item for item in items}


@dataclass(frozen=True)
class Overlap:
    """The share of an evaluation text that was used for calibration."""

    #: Estimated share of the evaluation's shingles, 0 to 1.
    share: float
    #: The same file, byte for byte.
    same_text: bool
    #: Number of hashes that the estimate is based on, and of those that both sketches have.
    sampled: int
    shared: int

    @property
    def warning(self) -> str | None:
        """A warning for the user, or None."""
        if self.same_text:
            return (
                "this text was used for calibration: results are not valid for other texts; evaluate on held-out text"
            )
        if self.share < NOTABLE or self.shared < NOTABLE_HASHES:
            return None
        return (
            f"about {100 * self.share:.0f} % of this text was used for calibration: results will look too good; "
            "evaluate on held-out text (quantkit calibration sets some aside)"
        )


def shingles(text: str) -> U64Array:
    """Return the hash of every shingle of ``text``, uint64, in order; a shorter text is one shingle, no text none."""
    cache: dict[str, int] = {}
    words = [_word_hash(word, cache) for word in _WORD.findall(text.casefold())]
    if not words:
        return np.empty(0, np.uint64)
    hashes = np.array(words, np.uint64)
    n = max(1, hashes.size - WORDS + 1)
    total = np.zeros(n, np.uint64)
    for i in range(min(WORDS, hashes.size)):
        total = total * np.uint64(_BASE) + hashes[i : i + n]
    for shift, factor in _MIX:
        total = (total ^ (total >> np.uint64(shift))) * np.uint64(factor)
    return total ^ (total >> np.uint64(31))


def _word_hash(word: str, cache: dict[str, int]) -> int:
    value = cache.get(word)
    if value is None:
        raw = hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest()
        value = cache[word] = int.from_bytes(raw, "little")
    return value


def sketch(text: str | bytes) -> Sketch:
    """Return the sketch of one text; bytes are read as UTF-8."""
    raw = _bytes(text)
    digest = hashlib.sha256(raw).hexdigest()
    return _thin(SCALE, np.unique(shingles(raw.decode(errors="replace"))), (digest,))


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogateescape")


def _sketch_evaluation(text: str | bytes) -> Sketch:
    """Return the sketch of a text with the digests of both possible files: evaluations drop a final newline."""
    raw = _bytes(text)
    stripped = raw.removesuffix(b"\n")
    digests = (hashlib.sha256(x).hexdigest() for x in (raw, stripped, stripped + b"\n"))
    return replace(sketch(raw), sha256=tuple(dict.fromkeys(digests)))


def merge_sketches(sketches: Sequence[Sketch]) -> Sketch:
    """Return the common sketch of several texts."""
    scale = max((s.scale for s in sketches), default=SCALE)
    hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *(s.hashes for s in sketches)]))
    return _thin(scale, hashes, tuple(dict.fromkeys(digest for s in sketches for digest in s.sha256)))


def _thin(scale: int, hashes: U64Array, sha256: tuple[str, ...]) -> Sketch:
    sample = _select_below(hashes, scale)
    while sample.size > MAX_HASHES:
        scale *= 2
        sample = _select_below(sample, scale)
    return Sketch(scale, sample, sha256)


def _select_below(hashes: U64Array, scale: int) -> U64Array:
    return hashes[hashes <= np.uint64((1 << 64) // scale - 1)]


def overlap(evaluation: str | bytes | Sketch, calibration: str | bytes | Sketch | Iterable[Sketch]) -> Overlap:
    """Estimate the share of ``evaluation`` that is in ``calibration``: texts, or sketches (sketch_of, manifests)."""
    one = evaluation if isinstance(evaluation, Sketch) else _sketch_evaluation(evaluation)
    if isinstance(calibration, (str, bytes, Sketch)):
        two = calibration if isinstance(calibration, Sketch) else sketch(calibration)
    else:
        two = merge_sketches(tuple(calibration))
    scale = max(one.scale, two.scale)
    sample = _select_below(one.hashes, scale)
    common = np.intersect1d(sample, _select_below(two.hashes, scale), assume_unique=True).size
    share = common / sample.size if sample.size else 0.0
    return Overlap(share, bool(set(one.sha256) & set(two.sha256)), sample.size, common)


def sketch_of(imatrix: Imatrix) -> Sketch | None:
    """Return the sketch of an importance matrix's texts, None if it has none.

    Raises FormatError for malformed keys.
    """
    return read_sketch(imatrix.path, imatrix.extra)


def read_sketch(path: Path, metadata: Mapping[str, Field], prefix: str = CALIBRATION) -> Sketch | None:
    """Return the sketch in metadata of ``path``, an importance matrix or a model made with one, or None.

    Raises FormatError for malformed keys.
    """
    fields = [metadata.get(key) for key in sketch_keys(prefix)]
    if not all(fields):
        return None
    scale, hashes, sha256 = (field for field in fields if field is not None)
    if (
        scale.type is not ValueType.UINT32
        or hashes.item_type is not ValueType.UINT64
        or sha256.item_type is not ValueType.STRING
        or scale.value < 1
    ):
        raise FormatError(f"{path}: the keys {prefix}* are malformed", "QK-E118")
    return Sketch(int(scale.value), np.unique(hashes.array.astype(np.uint64)), tuple(sha256.value))
