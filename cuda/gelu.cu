// GELU (cuflash/gelu.py):
//   y = x · Φ(x), Φ(x) = ½ + ½·erf(x·√½);  dx = dy · (Φ(x) + x·φ(x)), φ(x) = exp(−½·x·x) / √(2π)
//
// Where x is bf16, each block first fills a table of the function's values at every x with 2^-18 <= |x| < 16,
// in shared memory: a look-up costs less than the 50 to 90 instructions, and gives the same bits. Others are
// computed. Compiled with X_T, Y_T (forward), or BACKWARD, DY_T, X_T, DX_T.

#define BLOCK_THREADS 1024  // few blocks, as each fills a table
#define THREAD_FOURS 2

#include "functions.cuh"
#include "rows.cuh"

constexpr float sqrt_half = 0x1.6a09e6p-1f, inv_sqrt_two_pi = 0x1.988454p-2f;

inline float cdf(float x) { return 0.5f + 0.5f * erf_defined(x * sqrt_half); }

#ifdef BACKWARD
inline float function(float x) {
    const float pdf = exp_defined<true>(-0.5f * x * x) * inv_sqrt_two_pi;
    return cdf(x) + x * pdf;
}
#else
inline float function(float x) { return x * cdf(x); }
#endif

// The table's index of a bf16 number: exponent and mantissa above those of 2^-18, both signs.
constexpr unsigned first = (127 - 18) << 7, end = (127 + 4) << 7, half_size = end - first;

struct Table {
    float values[2 * half_size];

    void fill() {
        for (int i = threadIdx.x; i < 2 * half_size; i += blockDim.x) {
            const unsigned bits = i < half_size ? first + i : 0x8000u + first + i - half_size;
            values[i] = function(__uint_as_float(bits << 16));
        }
        __syncthreads();
    }

    float operator()(float x) const {
        const unsigned bits = __float_as_uint(x) >> 16, at = (bits & 0x7FFFu) - first;
        return at < half_size ? values[at + (bits >> 15) * half_size] : function(x);
    }
};

template <class T>
struct Direct {
    void fill() {}
    float operator()(float x) const { return function(x); }
};
template <class T>
struct Method {
    using type = Direct<T>;
};
template <>
struct Method<bf16> {
    using type = Table;
};

inline float4 apply(const Method<X_T>::type& f, float4 x) {
    return make_float4(f(x.x), f(x.y), f(x.z), f(x.w));
}

#ifdef BACKWARD
extern "C" __global__ void __launch_bounds__(block_threads, 2)
    gelu_backward(const DY_T* dy, const X_T* x, DX_T* dx, long long size, const Place place) {
    __shared__ Method<X_T>::type slope;
    slope.fill();
    FOR_BLOCKS(size) {
        float4 v[thread_fours], d[thread_fours];
        FOR_FOURS(j, i) v[j] = load4_flat(x, i, size), d[j] = load4_flat(dy, i, size);
        FOR_FOURS(j, i) store4_flat(dx, i, size, rnd4<gelu_dx>(d[j] * apply(slope, v[j]), place, 0, i));
    }
}
#else
extern "C" __global__ void __launch_bounds__(block_threads, 2)
    gelu_forward(const X_T* x, Y_T* y, long long size, const Place place) {
    __shared__ Method<X_T>::type gelu;
    gelu.fill();
    FOR_BLOCKS(size) {
        float4 v[thread_fours];
        FOR_FOURS(j, i) v[j] = load4_flat(x, i, size);
        FOR_FOURS(j, i) store4_flat(y, i, size, rnd4<gelu_y>(apply(gelu, v[j]), place, 0, i));
    }
}
#endif
