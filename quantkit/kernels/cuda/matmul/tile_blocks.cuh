// How many blocks of mat-vec by tiles (tile_dots.cuh) share a multiprocessor. Four of them, with 128 registers a thread, is
// what fits shared memory on sm_90; elsewhere the compiler puts some of IQ3_KT's aside then.
#pragma once
#define BLOCKS_AT_ONCE (ROWS > 8 || LANES < 32 || __CUDA_ARCH__ != 900 ? 3 : 4)
