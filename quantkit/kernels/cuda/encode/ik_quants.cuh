// ik_llama.cpp's own types: non-uniform levels, plain or shifted, of 2 to 6 bits; the twin of
// quantkit/kernels/cpu/encode/ik_quants.py, which has the layouts.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_iq3_k and the functions like it.
#pragma once
#include "encode/ik_blocks.cuh"
#include "encode/ik_pairs.cuh"
#include "encode/ik_parity.cuh"
#include "encode/ik_partitions.cuh"

struct EncodeIQ2_K : EncodeIkBlock<EncodeIQ2_K, IQ2, Scales4, 2> {
    // Four more arrays of 17 per lane; the blocks of a warp are padded so that all lanes read different banks.
    static const int SORTED = (IkBlock::SCRATCH + 31) / 32 * 32, SCRATCH = SORTED + 4 * 16 * 17 + 16;
    static const bool AGAIN = false;
    static constexpr float NEAR = 1.5f, STRETCH = 1.03f;
    STATIC_INLINE ScaleFit find(const Lane& lane, const Buckets<IQ2>& t) {
        float* own = lane.scratch + SORTED + 17 * lane.part;
        const Partitions<16, 16, 0> of = {own, own + 16 * 17, own + 32 * 17, own + 48 * 17};
        for (int j = 0; j < 16; j++) {
            of.x[j] = lane.x[j];
            of.w[j] = lane.w[j];
        }
        return of.search(t);
    }
};
struct EncodeIQ3_K : EncodeIkBlock<EncodeIQ3_K, IQ3, ScalesOdd, 3> {
    static constexpr float NEAR = 1.5f, STRETCH = 1.01f;
    STATIC_INLINE ScaleFit find(const Lane& lane, const Buckets<IQ3>& t) { return search<IQ3, 16, 3, 2, true>(lane, t); }
};
struct EncodeIQ4_K : EncodeIkBlock<EncodeIQ4_K, IQ4, Scales6, 4> {
    static const bool AGAIN = false, ZEROS = false;
    static constexpr float OWN = 0;
    STATIC_INLINE ScaleFit find(const Lane& lane, const Buckets<IQ4>& t) { return search<IQ4, 16, 7, 1, false>(lane, t); }
};
struct EncodeIQ5_K : EncodeIkBlock<EncodeIQ5_K, IQ5, Scales6, 5> {
    STATIC_INLINE ScaleFit find(const Lane& lane, const Buckets<IQ5>& t) { return search<IQ5, 16, 5, 1, false>(lane, t); }
};
struct EncodeIQ6_K : EncodeIkBlock<EncodeIQ6_K, IQ6, Scales8, 6> {
    STATIC_INLINE ScaleFit find(const Lane& lane, const Buckets<IQ6>& t) { return search<IQ6, 16, 5, 1, false>(lane, t); }
};

struct EncodeIQ2_KS : EncodeIkRow<EncodeIQ2_KS, IQ2, RowScales5<false>, 2, 2> {
    static const int OWN_ROOM = 2 * 33;
    static const bool ZEROS = true;
    static constexpr float NEAR = 1.5f, OWN = 0.25f, STRETCH = 1.03f;
    STATIC_INLINE ScaleFit find(const Lane& lane, const Tables& t) {
        return Partitions<32, 24, 8>{lane.x, lane.w, lane.scratch, lane.scratch + 33}.search(t.buckets);
    }
};
struct EncodeIQ3_KS : EncodeIkRow<EncodeIQ3_KS, IQ3, RowScales5<true>, 3, 2> {
    STATIC_INLINE ScaleFit find(const Lane& lane, const Tables& t) { return search<IQ3, 32, 5, 1, true>(lane, t.buckets); }
};
struct EncodeIQ4_KS : EncodeIkRow<EncodeIQ4_KS, IQ4, RowScales8, 4, 4> {
    static const int TERMS = 16;
    static const bool PAIRED = true;
    STATIC_INLINE ScaleFit find(const Lane& lane, const Tables& t) { return search<IQ4, 32, 7, 1, false>(lane, t.buckets); }
};
struct EncodeIQ5_KS : EncodeIkRow<EncodeIQ5_KS, IQ5, RowScales8, 5, 4> {
    STATIC_INLINE ScaleFit find(const Lane& lane, const Tables& t) { return search<IQ5, 32, 5, 1, false>(lane, t.buckets); }
};

struct EncodeIQ4_KSS : EvenLevels {};
struct EncodeIQ2_KL : PairLevels {};
