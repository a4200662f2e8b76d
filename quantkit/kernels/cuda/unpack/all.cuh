// Every type, by its name: a module is compiled with, for example, TYPE defined as Q4_K, and uses TYPE::unpack (of F32,
// F16 and BF16, whose BLOCK is 1: TYPE::value). Tables are static and vanish where nothing reads them.
#pragma once
#include "unpack/binary.cuh"
#include "unpack/floats.cuh"
#include "unpack/fp4.cuh"
#include "unpack/i_quants.cuh"
#include "unpack/k_quants.cuh"
#include "unpack/legacy.cuh"
#include "unpack/ternary.cuh"

// The words of a type's grid, 0 where it has none: Grid<TYPE>::WORDS.
template <typename T, typename = void> struct Grid {
    static const int WORDS = 0;
    STATIC_INLINE const uint32_t* table() { return nullptr; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t*) { T::unpack(p, part, l); }
};
template <typename T> struct Grid<T, decltype((void)T::GRID)> {
    static const int WORDS = T::GRID;
    STATIC_INLINE const uint32_t* table() { return T::table(); }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid) {
        T::unpack(p, part, l, grid);
    }
};

// Copy the grid to shared memory, all threads of a block; a barrier must follow before it is read.
template <typename T> INLINE void load_grid(uint32_t* shared) {
    for (int i = threadIdx.x; i < Grid<T>::WORDS; i += blockDim.x) shared[i] = Grid<T>::table()[i];
}

// Unpack with the grid at hand, if the type has one.
template <typename T> INLINE void unpack_with(const uint8_t* p, int part, Levels& l, const uint32_t* grid) {
    Grid<T>::unpack(p, part, l, grid);
}
