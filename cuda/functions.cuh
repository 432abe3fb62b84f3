// exp, exp2, log, rsqrt, erf, tanh as fixed sequences of fp32 operations: the twin of cuflash/functions.py,
// step for step, so that both give the same bits (numerics, section 6). Constants are compared by a test.
//
// Multiplications and additions stand alone, and exp and exp2 alone are fused.
#pragma once

namespace functions {

constexpr float ROUND = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer, kept in the low bits
constexpr float LOG2E = 1.442695f;
constexpr float LN2 = 0.6931472f;
// ln 2 = high + low in two 16-bit pieces, so that n·high and n·low are exact for |n| < 256.
constexpr float LN2_HIGH = 0.69314575f;
constexpr float LN2_LOW = 1.4286197e-06f;
// e^r = 1 + r·p(r) for |r| <= ln 2 / 2, and 2^r for |r| <= 1/2
constexpr float EXP_P[] = {1.0f, 0.49999994f, 0.16666521f, 0.041668266f, 0.008368677f, 0.0013820734f};
constexpr float EXP2_P[] = {0.6931472f, 0.24022648f, 0.0555036f, 0.009618506f, 0.0013390806f, 0.00015326466f};
// ln(1 + f) = f + f²·(f·p(f) - 1/2) for 1 + f in [√½, √2]
constexpr float LOG_P[] = {0.33333313f, -0.2500001f, 0.20002119f, -0.16667996f, 0.14219552f,
                           -0.12405588f, 0.11888164f, -0.11675658f, 0.067466445f};
// erf t = t + t·p(t²) up to ERF_SPLIT; above it 1 - exp(-(t + t·q(t))), which is 1 in fp32 from t = 4
constexpr float ERF_SPLIT = 0.921875f;
constexpr float ERF_P[] = {0.12837917f, -0.37612635f, 0.11283696f, -0.026859399f, 0.005201033f,
                           -0.00081427075f, 8.3701125e-05f};
constexpr float ERF_Q[] = {0.12851378f, 0.63572025f, 0.10525927f, -0.02288832f, 0.0032144438f,
                           -0.00021392296f};
// tanh t = t + t·(s·p(s)), s = t², up to TANH_SPLIT; above it 1 - 2/(e^2t + 1), which is 1 from t = 10
constexpr float TANH_SPLIT = 0.625f;
constexpr float TANH_P[] = {-0.3333328f, 0.13331442f, -0.053739715f, 0.020639088f, -0.0057049873f};

constexpr int ONE_BITS = 0x3F800000;
constexpr int SQRT_HALF_BITS = 0x3F3504F3;

// Unlike fmaxf and fminf these hand a NaN on.
__device__ __forceinline__ float max_nan(float a, float b) {
#ifdef __CUDA_ARCH__
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a != a || a > b ? a : b;
#endif
}

__device__ __forceinline__ float min_nan(float a, float b) {
#ifdef __CUDA_ARCH__
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a != a || a < b ? a : b;
#endif
}

// c0 + x·(c1 + x·(c2 + …)), a rounding per operation
template <int N>
__device__ __forceinline__ float horner(float x, const float (&c)[N]) {
    float w = c[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; i--) w = __fadd_rn(__fmul_rn(w, x), c[i]);
    return w;
}

// 2^power for -126 <= power <= 127; upper bits are shifted out, so n + ROUND may be given as it is.
__device__ __forceinline__ float power_of_two(int power, int bias = 0) {
    return __int_as_float((int)(((unsigned)power << 23) + (unsigned)(ONE_BITS + (bias << 23))));
}

// scale·(1 + r·p(r)), fused, for a power of 2 that costs nothing: it goes into the constants.
template <int N>
__device__ __forceinline__ float one_plus(float r, const float (&p)[N], float scale) {
    float w = p[N - 1] * scale;
#pragma unroll
    for (int i = N - 2; i >= 0; i--) w = __fmaf_rn(w, r, p[i] * scale);
    return __fmaf_rn(w, r, scale);
}

// 2^n·(1 + r·p(r)), n given as n + ROUND. The polynomial is taken times 2^-64, so that one normal factor
// reaches from 2^-150 to 2^63, and two reach past 2^127; only the last product rounds, below 2^-126.
template <bool small, int N>
__device__ __forceinline__ float exp_core(float n, float r, const float (&p)[N]) {
    const float w = one_plus(r, p, 0x1p-64f);
    const int k = __float_as_int(n);
    if (small) return __fmul_rn(w, power_of_two(k, 64));
    const int half = k >> 1;
    return __fmul_rn(__fmul_rn(w, power_of_two(half, 32)), power_of_two(k - half, 32));
}

// The same where the result is known to be normal, hence not NaN: n goes into the exponent.
template <int N>
__device__ __forceinline__ float exp_core_normal(float n, float r, const float (&p)[N]) {
    const unsigned w = (unsigned)__float_as_int(one_plus(r, p, 1.0f));
    return __int_as_float((int)(w + ((unsigned)__float_as_int(n) << 23)));
}

// t - n·ln 2, rounded once: t - n·high is exact.
__device__ __forceinline__ float exp_reduced(float t, float n) {
    const float m = __fsub_rn(n, ROUND);
    return __fmaf_rn(-m, LN2_LOW, __fmaf_rn(-m, LN2_HIGH, t));
}

}  // namespace functions

// e^x. small: x <= 40 or NaN is known; five instructions fewer, the same bits.
template <bool small = false>
__device__ __forceinline__ float exp_defined(float x) {
    using namespace functions;
    float t = max_nan(x, -104.0f);
    if (!small) t = min_nan(t, 89.0f);
    const float n = __fmaf_rn(t, LOG2E, ROUND);
    return exp_core<small>(n, exp_reduced(t, n), EXP_P);
}

// The same bits where |x| <= 86 is known; two instructions fewer than small.
__device__ __forceinline__ float exp_narrow(float x) {
    using namespace functions;
    const float n = __fmaf_rn(x, LOG2E, ROUND);
    return exp_core_normal(n, exp_reduced(x, n), EXP_P);
}

// 2^x. small: as above.
template <bool small = false>
__device__ __forceinline__ float exp2_defined(float x) {
    using namespace functions;
    float t = max_nan(x, -150.0f);
    if (!small) t = min_nan(t, 128.0f);
    const float n = __fadd_rn(t, ROUND);
    return exp_core<small>(n, __fsub_rn(t, __fsub_rn(n, ROUND)), EXP2_P);
}

// The same bits where |x| <= 125 is known.
__device__ __forceinline__ float exp2_narrow(float x) {
    using namespace functions;
    const float n = __fadd_rn(x, ROUND);
    return exp_core_normal(n, __fsub_rn(x, __fsub_rn(n, ROUND)), EXP2_P);
}

// Natural logarithm.
__device__ __forceinline__ float log_defined(float x) {
    using namespace functions;
    bool subnormal = x < 0x1p-126f;
    int bits = __float_as_int(subnormal ? __fmul_rn(x, 0x1p23f) : x);
    int k = (bits - SQRT_HALF_BITS) >> 23;
    float n = subnormal ? (float)(k - 23) : (float)k;
    float f = __fsub_rn(__int_as_float((int)((unsigned)bits - ((unsigned)k << 23))), 1.0f);
    float w = __fsub_rn(__fmul_rn(horner(f, LOG_P), f), 0.5f);
    w = __fmul_rn(w, __fmul_rn(f, f));
    // n·ln 2 + f + w: the first sum as an unevaluated pair, so that only the last addition costs accuracy
    float t = __fmul_rn(n, LN2_HIGH);
    float h = __fadd_rn(t, f);
    float lost = __fsub_rn(f, __fsub_rn(h, t));
    w = __fadd_rn(w, __fmul_rn(n, LN2_LOW));
    float result = __fadd_rn(h, __fadd_rn(lost, w));
    if (x == 0.0f) return __int_as_float((int)0xFF800000);
    if (!(x > 0.0f)) return __int_as_float(0x7FFFFFFF);
    return x < __int_as_float(0x7F800000) ? result : x;
}

// 1/√x, correctly rounded: fp64 is close enough for every fp32 x (tested on all of them).
__device__ __forceinline__ float rsqrt_defined(float x) {
    return __double2float_rn(__drcp_rn(__dsqrt_rn((double)x)));
}

__device__ __forceinline__ float erf_defined(float x) {
    using namespace functions;
    float t = __int_as_float(__float_as_int(x) & 0x7FFFFFFF);
    float result;
    if (t <= ERF_SPLIT) {
        result = __fadd_rn(__fmul_rn(horner(__fmul_rn(t, t), ERF_P), t), t);
    } else {
        t = min_nan(t, 4.0f);
        float u = __fadd_rn(__fmul_rn(horner(t, ERF_Q), t), t);
        result = __fsub_rn(1.0f, exp_defined<true>(-u));
    }
    return __int_as_float(__float_as_int(result) | (__float_as_int(x) & (int)0x80000000));
}

__device__ __forceinline__ float tanh_defined(float x) {
    using namespace functions;
    float t = __int_as_float(__float_as_int(x) & 0x7FFFFFFF);
    float result;
    if (t <= TANH_SPLIT) {
        float s = __fmul_rn(t, t);
        result = __fadd_rn(__fmul_rn(__fmul_rn(horner(s, TANH_P), s), t), t);
    } else {
        t = min_nan(t, 10.0f);
        float e = exp_defined<true>(__fadd_rn(t, t));
        result = __fsub_rn(1.0f, __fdiv_rn(2.0f, __fadd_rn(e, 1.0f)));
    }
    return __int_as_float(__float_as_int(result) | (__float_as_int(x) & (int)0x80000000));
}

// ---- the function unit's own (exp = mufu): the twin of cuflash/mufu.py

// 2^x. FTZ: subnormal arguments and results become 0, at less cost.
template <bool FTZ = false>
__device__ __forceinline__ float ex2_mufu(float x) {
    float y;
    if constexpr (FTZ) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    else asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float lg2_mufu(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
