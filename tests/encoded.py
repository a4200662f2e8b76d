"""The types that tests of encoders and decoders iterate over: what the code says it can do, nothing listed by hand."""

from __future__ import annotations

from quantkit.kernels.formats import has_decoder, has_encoder
from quantkit.types import TYPES

ENCODED = [t for t in TYPES if has_encoder(t)]
DECODED = [t for t in TYPES if has_decoder(t)]
#: Those that libggml encodes, too, and those that use an importance matrix.
GGMLS = [t for t in ENCODED if t.trees != "ik"]
WEIGHTED = [t for t in ENCODED if t.imatrix != "ignored"]
#: Types with a search of our own: not the reference's bytes, but no larger error (test_encode_trellis.py).
SEARCHED = [t for t in ENCODED if t.family == "trellis"]
#: Floats are their own specification: test_encode_corners.py.
GOLDEN = [t for t in ENCODED if t.family != "float" and t not in SEARCHED]
