// Types with one scale per row, from the value of largest magnitude (max_rows.cu): BLOCK values per block of BYTES,
// after HEADER bytes; row: writes a row, by all threads of a block. x: n values; most: the largest magnitude; part: 32
// shared words.
#pragma once
#include "encode/lane.cuh"
