// How types are written whose rows have one scale, of the value of largest magnitude (max_rows.cu): BLOCK values a block of
// BYTES, HEADER bytes before them, and row, with which the threads of a block together write a row. x: n values; most: the
// largest magnitude; part: 32 shared words.
#pragma once
#include "encode/lane.cuh"
