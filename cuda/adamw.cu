// AdamW of all parameters at once (cuflash/adamw.py). They lie one after the other in one array, each
// starting at a multiple of 8192 elements; a block takes 8192 elements of one.

#include "rows.cuh"

struct Tensor {
    long long begin, size;  // elements
    unsigned rows, columns, layer, module;
    int decays;
};

// Each scalar was one fp64 expression, rounded once.
struct Scalars {
    float keep;                 // 1 − lr·λ
    float rate1, beta2, rate2;  // 1 − β₁, β₂, 1 − β₂
    float bias2, eps;           // √(1 − β₂ᵗ), ε
    float step;                 // lr / (1 − β₁ᵗ)
};

inline float4 sqrt4(float4 x) { return make_float4(sqrtf(x.x), sqrtf(x.y), sqrtf(x.z), sqrtf(x.w)); }
inline float4 operator/(float4 a, float b) { return make_float4(a.x / b, a.y / b, a.z / b, a.w / b); }
inline float4 operator/(float4 a, float4 b) {
    return make_float4(a.x / b.x, a.y / b.y, a.z / b.z, a.w / b.w);
}
inline float4 operator+(float4 a, float b) { return make_float4(a.x + b, a.y + b, a.z + b, a.w + b); }

// blocks: which blocks of 8192 elements this launch updates; tensor_of: the parameter of each block. clip:
// what gradients are multiplied by. failed: not 0 once a step's loss or norm was not finite; then nothing
// changes any more.
extern "C" __global__ void __launch_bounds__(256)
    adamw(float* w, const float* g, float* m, float* v, const int* blocks, const int* tensor_of,
          const Tensor* tensors, const float* clip, const int* failed, const Scalars* scalars, Place place) {
    if (*failed) return;
    const Scalars s = *scalars;
    const int block = blocks[blockIdx.x];
    const Tensor tensor = tensors[tensor_of[block]];
    const float factor = *clip;
    place.layer[0] = tensor.layer, place.module[0] = tensor.module;
    place.rows = tensor.rows, place.columns = tensor.columns;
    const long long begin = block * 8192LL, end = tensor.begin + tensor.size;
    constexpr int together = 2;
    for (long long base = begin + 4 * threadIdx.x; base < begin + 8192; base += 1024 * together) {
        float4 wi[together], gi[together], mi[together], vi[together];
#pragma unroll
        for (int j = 0; j < together; j++) {  // what lies between the parameters is zero
            const long long i = base + 1024 * j;
            wi[j] = load_four(w + i), gi[j] = load_four(g + i), mi[j] = load_four(m + i),
            vi[j] = load_four(v + i);
        }
#pragma unroll
        for (int j = 0; j < together; j++) {
            const long long i = base + 1024 * j, at = i - tensor.begin;
            if (i >= end) continue;
            const float4 grad_i = rnd4<grad>(gi[j] * factor, place, 0, at);
            if (tensor.decays) wi[j] = wi[j] * s.keep;
            mi[j] = rnd4<adam_m>(mi[j] + (grad_i - mi[j]) * s.rate1, place, 0, at);
            vi[j] = rnd4<adam_v>(vi[j] * s.beta2 + grad_i * grad_i * s.rate2, place, 0, at);
            const float4 change = mi[j] / (sqrt4(vi[j]) / s.bias2 + s.eps) * s.step;
            wi[j] = rnd4<weight>(wi[j] - change, place, 0, at);
            store4_flat(w, i, end, wi[j]), store4_flat(m, i, end, mi[j]), store4_flat(v, i, end, vi[j]);
        }
    }
}
