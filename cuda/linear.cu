// Matrix products of the linear layers under a bit-defined accumulator (cuflash/linear.py): C = A · B + c, k
// ascending, no split of k. A: (M, K), B: (K, N), any strides. One slow, clear kernel; `library` is cuBLAS.
//
// A block of 128 threads computes 64 × 64 of C, 32 of k at a time from shared memory: on tensor cores
// (numerics, section 5), a warp 32 × 32, or by fma. Compiled with the product as product_linear, A_T, B_T,
// C_T, and A_ROWS and B_ROWS: whether A's k and B's n are contiguous. The last kernel is for results of
// cuBLAS.

#include "rows.cuh"

#ifdef PRODUCT_KERNEL
constexpr int tile = 64, depth = 32;

template <bool Sequential>
struct Block;

// 8 × 4 elements a thread.
template <>
struct Block<true> {
    float c[8][4] = {};

    int row(int i) const { return threadIdx.x / 16 * 8 + i; }
    int column(int j) const { return threadIdx.x % 16 + 16 * j; }

    void multiply(const float (&a)[tile][depth + 1], const float (&b)[depth][tile + 1], int count) {
        for (int k = 0; k < count; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) c[i][j] = __fmaf_rn(a[row(i)][k], b[k][column(j)], c[i][j]);
    }

    template <class F>
    void each(F f) const {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) f(row(i), column(j), c[i][j]);
    }
};

template <>
struct Block<false> {
    static constexpr Operand F = product_linear::operand;
    float c[2][4][4] = {};

    // k beyond count is zero on both sides, which changes no bits.
    void multiply(const float (&a)[tile][depth + 1], const float (&b)[depth][tile + 1], int count) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        for (int k = 0; k < count; k += mma_k<F>)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int r = warp / 2 * 32 + i * 16 + g, n = warp % 2 * 32 + j * 8 + g;
                    unsigned x[4], y[2];
                    if constexpr (F == Operand::tf32) {
#pragma unroll
                        for (int p = 0; p < 4; p++)
                            x[p] = __float_as_uint(a[r + p % 2 * 8][k + t + p / 2 * 4]);
#pragma unroll
                        for (int p = 0; p < 2; p++) y[p] = __float_as_uint(b[k + t + p * 4][n]);
                    } else {
#pragma unroll
                        for (int p = 0; p < 4; p++) {
                            const float* from = &a[r + p % 2 * 8][k + 2 * t + p / 2 * 8];
                            x[p] = pack<F>(from[0], from[1]);
                        }
#pragma unroll
                        for (int p = 0; p < 2; p++) {
                            const int k0 = k + 2 * t + p * 8;
                            y[p] = pack<F>(b[k0][n], b[k0 + 1][n]);
                        }
                    }
                    mma<F>(c[i][j], x, y);
                }
    }

    template <class Function>
    void each(Function f) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int p = 0; p < 4; p++)
                    f(warp / 2 * 32 + i * 16 + g + p / 2 * 8, warp % 2 * 32 + j * 8 + 2 * t + p % 2,
                      c[i][j][p]);
    }
};

// bias: (N), or null; place: of the result, (rows, columns) of a sample being those of C.
extern "C" __global__ void __launch_bounds__(128)
    linear(const A_T* a, const B_T* b, const float* bias, C_T* c, int M, int N, int K, long long a_row,
           long long a_k, long long b_k, long long b_column, long long c_row, const Place place) {
    __shared__ float sa[tile][depth + 1], sb[depth][tile + 1];
    const long long row0 = (long long)blockIdx.x * tile, column0 = (long long)blockIdx.y * tile;
    Block<product_linear::sequential> block;
    for (int k0 = 0; k0 < K; k0 += depth) {
        for (int i = threadIdx.x; i < tile * depth; i += 128) {
            const int r = A_ROWS ? i / depth : i % tile, k = A_ROWS ? i % depth : i / tile;
            sa[r][k] = row0 + r < M && k0 + k < K ? value(a[(row0 + r) * a_row + (k0 + k) * a_k]) : 0.f;
        }
        for (int i = threadIdx.x; i < tile * depth; i += 128) {
            const int k = B_ROWS ? i / tile : i % depth, n = B_ROWS ? i % tile : i / depth;
            sb[k][n] =
                column0 + n < N && k0 + k < K ? value(b[(k0 + k) * b_k + (column0 + n) * b_column]) : 0.f;
        }
        __syncthreads();
        block.multiply(sa, sb, K - k0 < depth ? K - k0 : depth);
        __syncthreads();
    }
    block.each([&](int i, int j, float x) {
        const long long row = row0 + i;
        const int column = int(column0) + j;
        if (row >= M || column >= N) return;
        x = x != x ? __int_as_float(0x7FFFFFFF) : x + 0.f;  // a zero is +0
        if (bias) x += bias[column];
        store(c + row * c_row + column, rnd<ROUNDED>(x, place.at(0, row, column)));
    });
}
#endif

// y = rnd(c + bias): what is left to do where cuBLAS gives fp32. bias: (columns), for BIAS. y may be c.
#ifdef FINISH_KERNEL
extern "C" __global__ void __launch_bounds__(256)
    linear_finish(const float* c, const float* bias, Y_T* y, int columns, long long c_row, long long y_row,
                  const Place place) {
    const long long row = blockIdx.x;
    for (int col = 4 * threadIdx.x; col < columns; col += 4 * blockDim.x) {
        float4 v = load4<WHOLE>(c + row * c_row, col, columns);
        if (BIAS) v = v + load4<WHOLE>(bias, col, columns);
        store4<WHOLE>(y + row * y_row, col, columns, rnd4<ROUNDED>(v, place.at(0, row, col)));
    }
}
#endif
