"""The types that tests of encoders and decoders iterate over, derived from the registry, not listed by hand.

Row-interleaved types are permutations of their base types: test_interleave.py.
"""

from __future__ import annotations

from quantkit.kernels.formats import FORMATS, has_decoder, has_encoder
from quantkit.kernels.interleave import is_interleaved
from quantkit.types import BY_NAME

ENCODABLE = [t for t in BY_NAME.values() if has_encoder(t) and not is_interleaved(t)]
DECODABLE = [t for t in BY_NAME.values() if has_decoder(t) and not is_interleaved(t)]
#: Types that libggml encodes, too, and those that use an importance matrix.
GGMLS = [t for t in ENCODABLE if t.is_in("mainline")]
WEIGHTED = [t for t in ENCODABLE if t.imatrix != "ignored"]
#: Types that do not require one.
UNWEIGHTED = [t for t in ENCODABLE if t.imatrix != "required"]
#: For code that is generic over unpackers: floats, and one type of each family, block and kind of row.
DECODED_ALIKE = list(
    {(t.family, t.block, t.row_header > 0, t.name if t.block == 1 else ""): t for t in DECODABLE}.values()
)
#: One type for each decoder and search: the other types of a family differ in levels, not in code.
ONE_OF_EACH = list(
    {
        (t.family, t.block, t.row_header, t.imatrix, t.name if (f := FORMATS.get(t.name)) is None or f.is_float
         else (f.span, f.mins, f.grid > 0)): t
        for t in DECODABLE
    }.values()
)  # fmt: skip
#: Types with quantkit's own search: not the reference's bytes, but no larger error (test_encode_trellis.py).
SEARCHED = [t for t in ENCODABLE if t.family == "trellis"]
#: Floats are their own specification: test_encode_corners.py. Types of single rows are in no file: ik's bytes are those
#: of four rows. A type of neither project has no reference.
GOLDEN = [t for t in ENCODABLE if t.family != "float" and t not in SEARCHED and t.in_files and t.trees != "none"]
#: Types that both projects encode, ik_llama.cpp by a search of its own; and all encoders, as type and name.
IK_ENCODED = [t for t in ENCODABLE if t.name in FORMATS and FORMATS[t.name].ik_encoder]
ENCODERS = [(t, "mainline") for t in ENCODABLE] + [(t, "ik") for t in IK_ENCODED] + [(BY_NAME["Q4_0"], "symmetric")]
