// ik_llama.cpp's own types: uneven values, plain or raised, of 2 to 6 bits; the twin of
// quantkit/kernels/cpu/encode/ik_quants.py, which has the layouts.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_iq3_k and its like.
#pragma once
#include "encode/ik_blocks.cuh"

struct EncodeIQ3_K : EncodeIkBlock<EncodeIQ3_K, IQ3, ScalesOdd, 3> {
    static constexpr float NEAR = 1.5f, STRETCH = 1.01f;
    STATIC_INLINE Found find(const Lane& lane, const Buckets<IQ3>& t) { return search<IQ3, 16, 3, 2, true>(lane, t); }
};
struct EncodeIQ4_K : EncodeIkBlock<EncodeIQ4_K, IQ4, Scales6, 4> {
    static const bool AGAIN = false, ZEROS = false;
    static constexpr float OWN = 0;
    STATIC_INLINE Found find(const Lane& lane, const Buckets<IQ4>& t) { return search<IQ4, 16, 7, 1, false>(lane, t); }
};
struct EncodeIQ5_K : EncodeIkBlock<EncodeIQ5_K, IQ5, Scales6, 5> {
    STATIC_INLINE Found find(const Lane& lane, const Buckets<IQ5>& t) { return search<IQ5, 16, 5, 1, false>(lane, t); }
};
struct EncodeIQ6_K : EncodeIkBlock<EncodeIQ6_K, IQ6, Scales8, 6> {
    STATIC_INLINE Found find(const Lane& lane, const Buckets<IQ6>& t) { return search<IQ6, 16, 5, 1, false>(lane, t); }
};
