// All types by name: a module is compiled with, for example, TYPE defined as Q4_K, and uses TYPE::unpack (for F32, F16
// and BF16, whose BLOCK is 1: TYPE::value). Unused tables are not compiled.
#pragma once
#include "unpack/bitnet.cuh"
#include "unpack/floats.cuh"
#include "unpack/fp4.cuh"
#include "unpack/i_quants.cuh"
#include "unpack/ik_quants.cuh"
#include "unpack/k_quants.cuh"
#include "unpack/legacy.cuh"
#include "unpack/ternary.cuh"
#include "unpack/trellis.cuh"

// The scale at the beginning of a row, a factor of all its values; 1 for types without one.
template <typename T> INLINE float row_scale(const uint8_t* row) {
    static_assert(T::ALIGN >= 4 || T::ROW_SCALE < 4, "a scale of four bytes is aligned");
    if (T::ROW_SCALE == 4) return *(const float*)row;
    if (T::ROW_SCALE == 2) return half_to_float(T::ALIGN > 1 ? load2(row) : (uint16_t)(row[0] | row[1] << 8));
    return 1;
}

// The same in products, which multiply some types' row scales by a gain (formats.py).
template <typename T> INLINE float product_scale(const uint8_t* row) { return row_scale<T>(row) * T::ROW_SCALE_GAIN; }

// A type's grid, if it has one: Grid<TYPE>::table().
template <typename T, bool = (T::GRID > 0)> struct Grid {
    STATIC_INLINE const uint32_t* table() { return nullptr; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t*) { T::unpack(p, part, l); }
};
template <typename T> struct Grid<T, true> {
    STATIC_INLINE const uint32_t* table() { return T::table(); }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid) { T::unpack(p, part, l, grid); }
};

// Copy the grid to shared memory with all threads of a block; a barrier must follow before reads.
template <typename T> INLINE void load_grid(uint32_t* shared) {
    for (int i = threadIdx.x; i < T::GRID; i += blockDim.x) shared[i] = Grid<T>::table()[i];
}

// Unpack with the given grid, if the type has one.
template <typename T> INLINE void unpack_with(const uint8_t* p, int part, Levels& l, const uint32_t* grid) {
    Grid<T>::unpack(p, part, l, grid);
}
