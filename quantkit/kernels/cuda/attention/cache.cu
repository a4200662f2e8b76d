// Writes keys and values to the cells of their tokens. A warp writes 32 columns of a row.
#include "attention/cache.cuh"

// k: [rows, k_width], v: [rows, v_width]; v_width 0: no v.
struct cache_write_args {
    const Batch* batch;
    const float *k, *v;
    uint8_t *k_cache, *v_cache;
    int64_t k_width, v_width;
};

// Block x: the token; y: eight warps' columns, those of k first.
KERNEL(cache_write, 256) {
    const int lane = threadIdx.x & 31;
    const int64_t token = blockIdx.x, k_parts = (a.k_width + 31) / 32;
    int64_t part = (int64_t)blockIdx.y * 8 + (threadIdx.x >> 5);
    if (part >= k_parts + (a.v_width + 31) / 32) return;
    const bool of_k = part < k_parts;
    if (!of_k) part -= k_parts;
    const int64_t width = of_k ? a.k_width : a.v_width, column = 32 * part + lane;
    const float x = column < width ? (of_k ? a.k : a.v)[token * width + column] : 0;
    uint8_t* row = (of_k ? a.k_cache : a.v_cache) + cell_of(a.batch, token) * cache_bytes(width);
    keep_column(x, row, column, column < width);
}
