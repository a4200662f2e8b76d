// The plan that `bucket` (moe.cu) writes for products by expert: the pairs (token, slot) of every expert, and the tiles
// of a grouped launch, for both numbers of tokens per tile (panel.cuh). int32 words:
//
//     0  tiles of up to 32 tokens   1  tiles of up to 128   2  pairs
//     16                   the pairs p = token * n_used + slot, by expert, those of an expert in order; padded to 4
//     then, 16-byte aligned, tiles of 32, then tiles of 128: expert, first (place in the list), count, 0; in both, full
//     ones by expert, then partial ones by expert
#pragma once
#include "core/device.cuh"

const int PLAN_PAIRS = 16;

// The most tiles possible: every expert's last one may be partial.
INLINE int64_t plan_tiles(int64_t pairs, int64_t n_expert, int tokens) {
    const int64_t used = pairs < n_expert ? pairs : n_expert;
    return (pairs - used) / tokens + used;
}

INLINE int64_t plan_tiles_at(int64_t pairs, int64_t n_expert, int tokens) {
    const int64_t at = PLAN_PAIRS + (pairs + 3) / 4 * 4;
    return tokens == 32 ? at : at + 4 * plan_tiles(pairs, n_expert, 32);
}

INLINE int plan_count_at(int tokens) { return tokens == 32 ? 0 : 1; }
