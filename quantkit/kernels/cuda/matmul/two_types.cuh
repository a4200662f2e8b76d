// Products with weights of TYPE, first::multiply, and, if defined, of OTHER, second::multiply (dots.cuh).
#pragma once
#ifdef FLOATS
#include "matmul/float_dots.cuh"
namespace first {
using ::multiply;
}
#else
#include "core/async_copy.cuh"
#include "matmul/lanes.cuh"
#include "unpack/tile_forms.cuh"
namespace first {
#include "matmul/dots.cuh"
}
#ifdef OTHER
#undef TYPE
#define TYPE OTHER
namespace second {
#include "matmul/dots.cuh"
}
#endif
#endif

// Whether to use the other type.
template <int M>
INLINE void multiply_either(bool other, const Team<ROWS>& team, const uint8_t* const (&w)[M], int64_t row_bytes, const uint8_t* x,
                            int64_t x_stride, int64_t n_in, float (&sums)[M][ROWS][COLUMNS]) {
#ifdef OTHER
    if (other) {
        second::multiply(team, w, (int)row_bytes, x, x_stride, (int)n_in, sums);
        return;
    }
#endif
    first::multiply(team, w, (int)row_bytes, x, x_stride, (int)n_in, sums);
}
