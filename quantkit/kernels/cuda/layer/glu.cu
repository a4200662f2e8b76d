// Gated linear units, out = activation(gate) * up, and plain activations; compiled for one ACTIVATION.
#include "core/functions.cuh"
#include "core/each.cuh"

// up 0: gate's rows hold both halves, 2 * width columns, the gate first. gate_width < width: every element of gate
// applies to width / gate_width adjacent columns. out may alias up.
struct glu_args {
    const float *gate, *up;
    float* out;
    int64_t width, gate_width, rows;
    double alpha, gate_limit, act_limit, up_limit;
};

KERNEL(glu, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const float alpha = (float)a.alpha, gate_limit = (float)a.gate_limit;
    const float act_limit = (float)a.act_limit, up_limit = (float)a.up_limit;
    const float* gate = a.gate + row * (a.up ? a.gate_width : 2 * a.width);
    const float* up = a.up ? a.up + row * a.width : gate + a.width;
    float* out = a.out + row * a.width;
    const auto f = [&](float g, float u) { return gated(g, u, gate_limit, act_limit, up_limit, alpha); };
    if (!a.up || a.gate_width == a.width) {
        each_column(a.width, a.width % 4 == 0, [&](uint32_t c, auto one) {
            using V = decltype(one);
            put(out + c, apply(f, get<V>(gate + c), get<V>(up + c)));
        });
    } else {
        const uint32_t repeat = (uint32_t)(a.width / a.gate_width);
        each_column(a.width, false, [&](uint32_t c, auto) { out[c] = f(gate[c / repeat], up[c]); });
    }
}

struct activate_args {
    const float* x;
    float* out;
    int64_t width, rows;
    double alpha, gate_limit, act_limit;
};

KERNEL(activate, 256) {
    const float alpha = (float)a.alpha, gate_limit = (float)a.gate_limit, act_limit = (float)a.act_limit;
    each_of(a.rows * a.width, [&](int64_t i, auto one) {
        const auto f = [&](float x) { return activated(x, gate_limit, act_limit, alpha); };
        put(a.out + i, apply(f, get<decltype(one)>(a.x + i)));
    });
}
