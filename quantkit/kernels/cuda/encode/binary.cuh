// Q1_0: one bit per weight, its sign, times the mean magnitude of the block; the twin of
// quantkit/kernels/cpu/encode/binary.py.
//
// Source: llama.cpp b11434 ggml-quants.c, quantize_row_q1_0_ref.
#pragma once
#include "encode/lane.cuh"

struct EncodeQ1_0 {
    static const int VALUES = 32, BLOCK = 128, BYTES = 18, ROOM = 0;
    static const bool WEIGHS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        uint32_t signs = 0;
        for (int i = 0; i < 32; i++) signs |= (uint32_t)(lane.x[i] >= 0) << i;
        for (int k = 0; k < 2; k++) *(uint16_t*)(lane.out + 2 + 4 * lane.part + 2 * k) = (uint16_t)(signs >> 16 * k);
        if (lane.part) return;
        float sum = 0;  // of the values of four lanes
        for (int i = 0; i < 128; i++) sum = sum + fabsf(lane.x[i / 32 * 33 + i % 32]);
        store_half(lane.out, sum / 128.0f);
    }
};
