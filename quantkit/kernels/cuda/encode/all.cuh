// Every encoder.
#pragma once
#include "encode/bitnet.cuh"
#include "encode/fp4.cuh"
#include "encode/i_quants.cuh"
#include "encode/ik_quants.cuh"
#include "encode/k_quants.cuh"
#include "encode/legacy.cuh"
#include "encode/ternary.cuh"
#include "encode/trellis.cuh"
