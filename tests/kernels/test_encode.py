"""Every encoder, one way for all types: the same bytes whatever the batches and the rows.

Golden bytes are in test_kernels.py, ggml's own in test_encode_ggml.py; what is special to a type is in
test_encode_corners.py.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from type_params import ENCODERS

from edge_rows import NO_WEIGHTS, assert_same_bytes, awkward_imatrix, awkward_rows, encode, weights_for
from quantkit.kernels.cpu.encode import encoder
from quantkit.types import TensorType

#: Types whose blocks are encoded independently of the rest of the row.
BY_BLOCK = [(t, encoder_name) for t, encoder_name in ENCODERS if t.is_quantized and not t.row_header]
#: Those that weigh by the mean square of a whole row.
BY_ROW = "legacy"


#: IQ4_KT searches for seconds; other trellis types show the same.
ROWS = [(3, t, encoder_name) for t, encoder_name in ENCODERS] + [
    (40, t, encoder_name) for t, encoder_name in ENCODERS if t.name != "IQ4_KT"
]


@pytest.mark.parametrize(("blocks", "t", "encoder_name"), ROWS, ids=str)
def test_every_row_range_gives_the_same_bytes(blocks: int, t: TensorType, encoder_name: str) -> None:
    """Importance starts again with each row, at any place in a batch; other rows are unchanged."""
    n = blocks * t.block if t.is_quantized else 12 * blocks + 1
    x = np.tile(awkward_rows(n, 5, 1e3), (2, 1))[:41]
    for w in weights_for(t, awkward_imatrix(n, 5)):
        expected = encode(t, x, w, encoder_name)
        for row0, row1 in ((0, 1), (3, 20), (7, 40), (40, 41), (5, 5)):
            out = np.full_like(expected, 0x5A)
            encoder(t, encoder_name)(x, w, out, row0, row1)
            assert_same_bytes(out[row0:row1], expected[row0:row1], t)
            assert (out[:row0] == 0x5A).all()
            assert (out[row1:] == 0x5A).all()


@pytest.mark.parametrize(("t", "encoder_name"), BY_BLOCK, ids=str)
def test_golden_blocks_do_not_depend_on_their_batch(t: TensorType, encoder_name: str) -> None:
    """A row of 43 blocks, as full batches and a part of one, and block by block."""
    rng, n = np.random.default_rng(0), t.block
    x = (rng.standard_normal(43 * n) * np.exp(rng.standard_normal(43 * n) / 2)).astype(np.float32)[None]
    x[0, 5 * n : 6 * n] = 0
    weights_of_rows = NO_WEIGHTS if t.family == BY_ROW else np.exp(rng.standard_normal(43 * n)).astype(np.float32)
    for weights in weights_for(t, weights_of_rows):
        expected = encode(t, x, weights, encoder_name).reshape(43, -1)
        for b in range(43):
            part = slice(b * n, b * n + n)
            assert_same_bytes(encode(t, x[:, part], weights[part], encoder_name), expected[b : b + 1], t)


def before_a_wall(array: np.ndarray) -> np.ndarray:
    """Return a copy whose last byte lies right before a page that may be neither read nor written."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    area = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), page, 0) == 0
    copy = np.frombuffer(area, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize(("t", "encoder_name"), ENCODERS, ids=str)
def test_encoders_stay_in_bounds(t: TensorType, encoder_name: str) -> None:
    """Batches that are not full end with the rows. A fault ends the process, and the run with this test's name."""
    n = 3 * t.block if t.is_quantized else 37
    x = awkward_rows(n, 2, 1e3)[:3]
    for weights in weights_for(t, awkward_imatrix(n, 2)):
        out = before_a_wall(np.zeros((len(x), t.row_bytes(n)), np.uint8))
        encoder(t, encoder_name)(before_a_wall(x), before_a_wall(weights) if weights.size else weights, out, 0, len(x))
        assert_same_bytes(out, encode(t, x, weights, encoder_name), t)
