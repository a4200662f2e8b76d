// Blocks of mat-vec by tiles (tile_dots.cuh) per multiprocessor. Four of them, with 128 registers per thread, fit the
// shared memory of sm_90; elsewhere the compiler would spill some registers of IQ3_KT.
#pragma once
#define BLOCKS_AT_ONCE (ROWS > 8 || LANES < 32 || __CUDA_ARCH__ != 900 ? 3 : 4)
