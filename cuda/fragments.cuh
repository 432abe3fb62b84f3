// Products of a warp's 16·M rows, in mma.cuh's fragments, with rows that lie in shared memory. A Product says
// how: by 16-bit or tf32 tensor cores, or `sequential` on CUDA cores; WARPGROUP, whether a warpgroup does a 16-bit
// one together, M = 1. The sum runs over ascending k.
#pragma once

#include "copy.cuh"
#include "sites.cuh"
#include "wgmma.cuh"

// A tile of Rows × Columns elements in shared memory, by 16-byte chunks. For wgmma: panels of 128 bytes of each
// row, whose chunks are permuted by row (its 128-byte swizzle). Otherwise a row ends in 16 bytes of padding: it
// is then an odd number of chunks, and the 8 rows of a matrix that ldmatrix reads at once lie in different banks.
template <class P, int Rows, int Columns>
struct SharedTile {
    static constexpr int element = P::half ? 2 : 4;
    static constexpr int row = WARPGROUP ? 128 : Columns * element + 16;  // bytes to the next row
    static constexpr int panel = Rows * 128;
    static constexpr int bytes = WARPGROUP ? Columns * element / 128 * panel : Rows * row;

    // Where a chunk lies.
    static constexpr int chunk(int r, int c) {
        return WARPGROUP ? c / 8 * panel + r * 128 + (c ^ r) % 8 * 16 : r * row + c * 16;
    }
};

inline float shared_float(unsigned address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

inline float2 shared_float2(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

inline float4 shared_float4(unsigned address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}

// c (16M × 8N) = A·Bᵀ: A 16M rows of the tile SharedA, from `a` on (of a warpgroup, its 64), B the tile SharedB at
// `b`. A warpgroup only begins it: c, A and B are its own until product_wait.
template <class P, class SharedA, class SharedB, int K, int M, int N>
inline void product_rows(float (&c)[M][N][4], unsigned a, unsigned b) {
    constexpr int stride = SharedA::row;
    static_assert(stride == SharedB::row);
    const unsigned lane = threadIdx.x % 32;
    if constexpr (!WARPGROUP) {
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) c[i][j][e] = 0;
    }
    if constexpr (WARPGROUP) {
#if WARPGROUP
        float(&d)[4 * N] = reinterpret_cast<float(&)[4 * N]>(c);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            const auto da = matrix_descriptor(a + k / 4 * SharedA::panel + k % 4 * 32, 16, 1024, Swizzle::b128);
            const auto db = matrix_descriptor(b + k / 4 * SharedB::panel + k % 4 * 32, 16, 1024, Swizzle::b128);
            if (k == 0) wgmma<P::operand, false, true>(d, da, db);
            else wgmma<P::operand>(d, da, db);
        }
        wgmma_commit();
#endif
    } else if constexpr (P::half) {
        a += lane % 16 * stride + lane / 16 * 16;
        b += (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            unsigned x[M][4];
#pragma unroll
            for (int i = 0; i < M; i++) load_matrices(x[i], a + i * 16 * stride + k * 32);
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                unsigned y[4];
                load_matrices(y, b + j * 8 * stride + k * 32);
#pragma unroll
                for (int i = 0; i < M; i++) {
                    mma<P::operand>(c[i][j], x[i], {y[0], y[1]});
                    mma<P::operand>(c[i][j + 1], x[i], {y[2], y[3]});
                }
            }
        }
    } else if constexpr (!P::sequential) {
        const unsigned g = lane / 4, t = lane % 4;
        a += g * stride + t * 4;
        b += g * stride + t * 4;
#pragma unroll 2
        for (int k = 0; k < K / 8; k++) {
            unsigned x[M][4];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[i][e] = __float_as_uint(shared_float(a + (i * 16 + e % 2 * 8) * stride + k * 32 + e / 2 * 16));
#pragma unroll
            for (int j = 0; j < N; j++) {
                const unsigned y[2] = {__float_as_uint(shared_float(b + j * 8 * stride + k * 32)),
                                       __float_as_uint(shared_float(b + j * 8 * stride + k * 32 + 16))};
#pragma unroll
                for (int i = 0; i < M; i++) mma<P::operand>(c[i][j], x[i], y);
            }
        }
    } else {
        const unsigned g = lane / 4, t = lane % 4;
        a += g * stride;
        b += 2 * t * stride;
#pragma unroll 1
        for (int k = 0; k < K; k += 4) {
            float4 x[M][2];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) x[i][h] = shared_float4(a + (i * 16 + h * 8) * stride + k * 4);
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 y = shared_float4(b + (j * 8 + e) * stride + k * 4);
#pragma unroll
                    for (int i = 0; i < M; i++)
#pragma unroll
                        for (int h = 0; h < 2; h++) fma4(c[i][j][2 * h + e], x[i][h], y);
                }
        }
    }
}

template <int M, int N>
inline void product_wait(float (&c)[M][N][4]) {
#if WARPGROUP
    wgmma_wait<0>();
    wgmma_hold(reinterpret_cast<float(&)[4 * N]>(c));
#endif
}

// A fragment C of 16M × 8N as the A operand of a second product: packed in pairs for 16 bits, else fp32.
template <class P, int M, int N>
struct Weights {
    static constexpr int per_row = P::half ? 1 : 2;  // registers for two neighbours
    unsigned x[M][N][2 * per_row];                   // [h · per_row + …], h: row g or g + 8

    float value(int i, int j, int e) const {
        return P::half ? (e % 2 ? unpack<P::operand>(x[i][j][e / 2]).y : unpack<P::operand>(x[i][j][e / 2]).x)
                       : __uint_as_float(x[i][j][e]);
    }
};

// A warpgroup's c += W·B below in steps of 16 rows of B: fence, begin each step, commit, product_wait. W's
// registers of a step are its own until then, too.
template <class P, class Shared, int M, int N, int C>
inline void begin_step(float (&c)[M][C][4], const Weights<P, M, N>& w, unsigned b, int first, int k) {
#if WARPGROUP
    constexpr int together = C % 16 == 0 ? 16 : 8;  // fragments of 8 columns in a wgmma
    static_assert(M == 1 && C % together == 0);
    const unsigned x[4] = {w.x[0][2 * k][0], w.x[0][2 * k][1], w.x[0][2 * k + 1][0], w.x[0][2 * k + 1][1]};
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < C; j += together) {
        const unsigned from = b + (first / 8 + j) / 8 * Shared::panel + k * 2048;
        wgmma<P::operand, true>(reinterpret_cast<float(&)[4 * together]>(c[0][j]), x,
                                matrix_descriptor(from, Shared::panel, 1024, Swizzle::b128));
    }
#endif
}

template <int M, int C>
inline void end_steps(float (&c)[M][C][4]) {
#if WARPGROUP
    wgmma_commit();
    product_wait(c);
#endif
}

// c (16M × 8C) += W·B: B 8N rows of the tile Shared at `b`, of which c takes 8C columns from `first` on, C even.
template <class P, class Shared, int M, int N, int C>
inline void product_columns(float (&c)[M][C][4], const Weights<P, M, N>& w, unsigned b, int first) {
    constexpr int stride = Shared::row;
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (WARPGROUP) {
#pragma unroll
        for (int k = 0; k < N / 2; k++) begin_step<P, Shared>(c, w, b, first, k);
        end_steps(c);
    } else if constexpr (P::half) {
        b += lane % 16 * stride + lane / 16 * 16 + first * 2;
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
#pragma unroll
            for (int j = 0; j < C; j += 2) {
                unsigned y[4];
                load_matrices_transposed(y, b + k * 16 * stride + j * 16);
#pragma unroll
                for (int i = 0; i < M; i++) {
                    const unsigned x[4] = {w.x[i][2 * k][0], w.x[i][2 * k][1], w.x[i][2 * k + 1][0],
                                           w.x[i][2 * k + 1][1]};
                    mma<P::operand>(c[i][j], x, {y[0], y[1]});
                    mma<P::operand>(c[i][j + 1], x, {y[2], y[3]});
                }
            }
        }
    } else if constexpr (!P::sequential) {
        // The 8 products of a group are summed at once, in any order: columns 2t, 2t + 1 of W, which a thread
        // holds, take the places t, t + 4 of the group, and so do the rows of B.
        b += 2 * t * stride + (g + first) * 4;
#pragma unroll
        for (int k = 0; k < N; k++)
#pragma unroll
            for (int j = 0; j < C; j++) {
                const unsigned y[2] = {__float_as_uint(shared_float(b + k * 8 * stride + j * 32)),
                                       __float_as_uint(shared_float(b + (k * 8 + 1) * stride + j * 32))};
#pragma unroll
                for (int i = 0; i < M; i++) {
                    const unsigned x[4] = {w.x[i][k][0], w.x[i][k][2], w.x[i][k][1], w.x[i][k][3]};
                    mma<P::operand>(c[i][j], x, y);
                }
            }
    } else {
        b += (2 * t + first) * 4;
#pragma unroll
        for (int k = 0; k < N; k++)
#pragma unroll
            for (int e = 0; e < 8; e++) {  // the k-th eight of rows; thread e / 2 of the quad holds W there
                float x[M][2];
#pragma unroll
                for (int i = 0; i < M; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        x[i][h] = __shfl_sync(0xFFFFFFFFu, __uint_as_float(w.x[i][k][2 * h + e % 2]), e / 2, 4);
#pragma unroll
                for (int j = 0; j < C; j++) {
                    const float2 y = shared_float2(b + (k * 8 + e) * stride + j * 32);
#pragma unroll
                    for (int i = 0; i < M; i++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            c[i][j][2 * h] = __fmaf_rn(x[i][h], y.x, c[i][j][2 * h]);
                            c[i][j][2 * h + 1] = __fmaf_rn(x[i][h], y.y, c[i][j][2 * h + 1]);
                        }
                }
            }
    }
}
