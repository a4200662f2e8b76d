// Rows of a cache that represent blocks of positions, and the cells visible to a token: a window, then blocks.
#include "attention/cache.cuh"

// k: [rows, k_width]. A token that ends a block of `ratio` positions is written to the cell first + sequence * (n_ctx
// / ratio) + block.
struct block_write_args {
    const Batch* batch;
    const float* k;
    uint8_t* k_cache;
    int64_t k_width, ratio, first;
};

// Block x: the token; y: eight warps' columns, 32 each.
KERNEL(block_write, 256) {
    const int lane = threadIdx.x & 31;
    const int64_t token = blockIdx.x, part = (int64_t)blockIdx.y * 8 + (threadIdx.x >> 5);
    const int64_t position = a.batch->positions[token], column = 32 * part + lane;
    if (32 * part >= a.k_width || (position + 1) % a.ratio) return;
    const float x = column < a.k_width ? a.k[token * a.k_width + column] : 0;
    const int64_t cell = a.first + a.batch->sequences[token] * (a.batch->n_ctx / a.ratio) + position / a.ratio;
    keep_column(x, a.k_cache + cell * cache_bytes(a.k_width), column, column < a.k_width);
}

// out: [rows][n_out], cells relative to that of the sequence's position 0: the last `window` positions, then blocks,
// then -1. blocks: [rows][n_out - window], block numbers, or null: all complete blocks.
struct window_and_blocks_args {
    const Batch* batch;
    int32_t* out;
    const int32_t* blocks;
    int64_t rows, n_out, window, ratio, first;
};

KERNEL(window_and_blocks, 256) {
    const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (at >= a.rows * a.n_out) return;
    const int64_t token = at / a.n_out, i = at % a.n_out, room = a.n_out - a.window;
    const int64_t end = a.batch->positions[token] + 1, sequence = a.batch->sequences[token], n_ctx = a.batch->n_ctx;
    const int64_t near = min(end, a.window), far = min(end / a.ratio, room), j = i - near;
    int64_t cell = -1;
    if (i < near) cell = end - near + i;
    else if (j < far) cell = a.first + sequence * (n_ctx / a.ratio - n_ctx) + (a.blocks ? a.blocks[token * room + j] : j);
    a.out[at] = (int32_t)cell;
}
