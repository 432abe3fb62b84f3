// Arrays of the network: (samples, T, columns), or (out, in) for weights. Four neighbours at a time.
#pragma once

#include "dtypes.cuh"

// Where arrays lie in the network, for modes that draw random words: a (layer, module) for each of a kernel's
// sites.
struct Place {
    unsigned seed_low, seed_high, step, sample;
    unsigned layer[3], module[3];
    int rows, columns;  // of a sample

    At at(int site, long long row, int col) const {
        const long long n = row / rows;
        return {make_uint2(seed_low, seed_high),
                step,
                layer[site],
                sample + unsigned(n),
                module[site],
                unsigned(row - n * rows),
                unsigned(col),
                0};
    }
};

// A value that no site rounds.
using unrounded = Site<8, 23, mode_rne, false, 0, true>;

template <class T>
struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

template <class T>
inline float4 load_four(const T* from) {
    const Four<T> x = *reinterpret_cast<const Four<T>*>(from);
    return make_float4(value(x.at[0]), value(x.at[1]), value(x.at[2]), value(x.at[3]));
}

// Values of the dtype; nothing is rounded here.
inline void store_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
inline void store_four(bf16* to, float4 x) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack<Operand::bf16>(x.x, x.y), pack<Operand::bf16>(x.z, x.w));
}
inline void store_four(fp16* to, float4 x) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack<Operand::fp16>(x.x, x.y), pack<Operand::fp16>(x.z, x.w));
}

// Elements i … i + 3 of `size`; zeros past the end. Whole: `size` is a multiple of four and x aligned to four
// elements.
template <bool Whole, class T>
inline float4 load4(const T* x, long long i, long long size) {
    if constexpr (Whole) return i < size ? load_four(x + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    return make_float4(i < size ? value(x[i]) : 0.f, i + 1 < size ? value(x[i + 1]) : 0.f,
                       i + 2 < size ? value(x[i + 2]) : 0.f, i + 3 < size ? value(x[i + 3]) : 0.f);
}

template <bool Whole, class T>
inline void store4(T* x, long long i, long long size, float4 v) {
    if constexpr (Whole) {
        if (i < size) store_four(x + i, v);
        return;
    }
    if (i < size) store(x + i, v.x);
    if (i + 1 < size) store(x + i + 1, v.y);
    if (i + 2 < size) store(x + i + 2, v.z);
    if (i + 3 < size) store(x + i + 3, v.w);
}

// ---- rounding

// Four neighbours of a row.
template <class S>
inline float4 rnd4(float4 x, const At& at) {
    return make_float4(rnd<S>(x.x, at), rnd<S>(x.y, at(at.row, at.col + 1)),
                       rnd<S>(x.z, at(at.row, at.col + 2)), rnd<S>(x.w, at(at.row, at.col + 3)));
}

// Elements i … i + 3 of an array, whose rows may end between them.
template <class S>
inline float4 rnd4(float4 x, const Place& place, int site, long long i) {
    const auto at = [&](int j) {
        return place.at(site, (i + j) / place.columns, int((i + j) % place.columns));
    };
    return make_float4(rnd<S>(x.x, at(0)), rnd<S>(x.y, at(1)), rnd<S>(x.z, at(2)),
                       rnd<S>(x.w, at(3)));
}

// ---- arithmetic

inline float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
inline float4 operator*(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
inline float4 operator*(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
inline float4 operator-(float4 a, float4 b) {
    return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
inline float4 operator-(float4 a, float b) { return make_float4(a.x - b, a.y - b, a.z - b, a.w - b); }

// ---- elementwise kernels

// Elements i … i + 3 of a whole array, aligned to four.
template <class T>
inline float4 load4_flat(const T* x, long long i, long long size) {
    return i + 4 <= size ? load_four(x + i) : load4<false>(x, i, size);
}

template <class T>
inline void store4_flat(T* x, long long i, long long size, float4 v) {
    if (i + 4 <= size)
        store_four(x + i, v);
    else
        store4<false>(x, i, size, v);
}

// A thread loads its fours of a turn before it stores one, so that enough loads are under way.
#ifndef BLOCK_THREADS
#define BLOCK_THREADS 256
#define THREAD_FOURS 4
#endif
constexpr int block_threads = BLOCK_THREADS, thread_fours = THREAD_FOURS;
constexpr long long block_elements = 4 * block_threads * thread_fours;

#define FOR_BLOCKS(size) \
    for (long long block = blockIdx.x * block_elements; block < size; block += gridDim.x * block_elements)
#define FOR_FOURS(j, i)                                                                    \
    _Pragma("unroll") for (long long j = 0, i = block + 4 * threadIdx.x; j < thread_fours; \
                           j++, i += 4 * block_threads)
