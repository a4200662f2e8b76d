// Kernels of the file pipeline other than encoders.
#include "core/each.cuh"

// Sets found to 1 if one of n values is NaN or infinite; otherwise leaves it unchanged.
struct not_finite_args {
    const float* x;
    int32_t* flag;
    int64_t n;
};

INLINE bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }
INLINE bool is_finite(float4 x) { return is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w); }

KERNEL(not_finite, 256) {
    each_of(a.n, [&](int64_t i, auto one) {
        if (!is_finite(get<decltype(one)>(a.x + i))) *a.flag = 1;
    });
}
