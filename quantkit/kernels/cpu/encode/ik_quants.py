"""ik_llama.cpp's own types: uneven values, plain or shifted, of 2 to 6 bits.

Two have separate searches: IQ4_KSS (ik_parity.py) and IQ2_KL (ik_pairs.py). IQ2_K and IQ2_KS try all partitions
(ik_partitions.py): for IQ2_KS that is what ggml_quantize_chunk does without user data, and --slow-iq2ks.

With a scale per super-block of 256 values (ik_blocks.py), sub-blocks of 16::

    IQ2_K    f16 d, u16 shifted, u8 scales[8], u8 qs[64]                                 multiples -8..7
    IQ3_K    f16 d, u16 shifted, u16 signs, u8 scales[8], u8 qs[64], u8 qh[32]           odd multiples of d, -31..31
    IQ4_K    f16 d, u16 shifted, u8 scales_h[4], u8 scales_l[8], u8 qs[128]              multiples -32..31
    IQ5_K    f16 d, u16 shifted, u8 scales_h[4], u8 scales_l[8], u8 qs[128], u8 qh[32]   the same
    IQ6_K    f16 d, u16 shifted, i8 scales[16], u8 qs[128], u8 qh[64]                    multiples -127..127

With a scale d per row, before its super-blocks (ik_rows.py), sub-blocks of 32::

    IQ2_KS   f16 d; u16 shifted and high bits, u8 scales[4], u8 qs[64]                   multiples -16..15
    IQ2_KL   f16 d; u16 scales_h, u8 scales_l[4], u8 qs[64], u8 qh[16]                  multiples -32..31
    IQ3_KS   f16 d; u16 shifted and high bits, u8 scales[4], u8 qs[64], u8 qh[32]        multiples -16..15
    IQ4_KS   f32 d; u8 scales[8], u8 qs[128]                                            odd multiples -127..127
    IQ4_KSS  f32 d; u16 qs[8][8], whose lowest bits are the scales                      the same
    IQ5_KS   f32 d; u8 scales[8], u8 qs[128], u8 qh[32]                                 the same

Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_iq3_k and its like.
"""

from __future__ import annotations

from quantkit.kernels.cpu.encode import ik_blocks, ik_rows
from quantkit.kernels.cpu.encode.ik_blocks import block_encoder
from quantkit.kernels.cpu.encode.ik_levels import IQ2, IQ3, IQ4, IQ5, IQ6
from quantkit.kernels.cpu.encode.ik_pairs import scale_6_bit, search_pairs, store_pairs
from quantkit.kernels.cpu.encode.ik_parity import search_even, store_even
from quantkit.kernels.cpu.encode.ik_partitions import search_16, search_32
from quantkit.kernels.cpu.encode.ik_rows import row_encoder, rows_encoder
from quantkit.kernels.cpu.encode.ik_search import make_search, pack_2, pack_3, pack_4, pack_5, pack_6

encode_iq2_k = block_encoder(
    "IQ2_K", IQ2, search_16, ik_blocks.SCALES_4_BIT, pack_2, sigma2_factor=1.5, refits=False, d_gain=1.03
)
encode_iq3_k = block_encoder(
    "IQ3_K",
    IQ3,
    make_search("iq3_k", IQ3, 16, 3, 2, True),
    ik_blocks.SCALES_ODD,
    pack_3,
    sigma2_factor=1.5,
    d_gain=1.01,
)
encode_iq4_k = block_encoder(
    "IQ4_K",
    IQ4,
    make_search("iq4_k", IQ4, 16, 7),
    ik_blocks.SCALES_6_BIT,
    pack_4,
    sigma2_share=0,
    refits=False,
    zeros=False,
)
encode_iq5_k = block_encoder("IQ5_K", IQ5, make_search("iq5_k", IQ5, 16, 5), ik_blocks.SCALES_6_BIT, pack_5)
encode_iq6_k = block_encoder("IQ6_K", IQ6, make_search("iq6_k", IQ6, 16, 5), ik_blocks.SCALES_8_BIT, pack_6)

encode_iq2_ks = row_encoder(
    "IQ2_KS",
    IQ2,
    search_32,
    ik_rows.SCALES_FITTED,
    pack_2,
    zeros=True,
    sigma2_factor=1.5,
    sigma2_share=0.25,
    d_gain=1.03,
)
encode_iq3_ks = row_encoder("IQ3_KS", IQ3, make_search("iq3_ks", IQ3, 32, 5, 1, True), ik_rows.SCALES_5_BIT, pack_3)
encode_iq4_ks = row_encoder("IQ4_KS", IQ4, make_search("iq4_ks", IQ4, 32, 7), ik_rows.SCALES_8_BIT, pack_4, paired=True)
encode_iq5_ks = row_encoder("IQ5_KS", IQ5, make_search("iq5_ks", IQ5, 32, 5), ik_rows.SCALES_8_BIT, pack_5)
encode_iq4_kss = rows_encoder("IQ4_KSS", search_even, ik_rows.scale_8_bit, store_even, d_gain=1.01)
encode_iq2_kl = rows_encoder(
    "IQ2_KL", search_pairs, scale_6_bit, store_pairs, sigma2_factor=2.25, magnitudes=True, d_gain=1.025
)
