// What the hardware itself computes, for tests/gpu/test_hardware.py: tensor cores (numerics.md section 5)
// and the function unit (section 6). Nothing in the library calls these.

#include "mma.cuh"
#include "wgmma.cuh"

// d = a · bᵀ + c for row-major a (M, K), b (N, K), c and d (M, N).

// One warp per 16 × 8 tile of d, grid (N / 8, M / 16).
template <Operand F, class T>
inline void mma_tile(const T* a, const T* b, const float* c, float* d, int n, int k) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const int row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
    const size_t at = size_t(row) * n + column + 2 * t, below = at + size_t(8) * n;
    float acc[4] = {c[at], c[at + 1], c[below], c[below + 1]};
    const T* ra = a + size_t(row) * k;
    const T* rb = b + size_t(column + g) * k;
    for (int i = 0; i < k; i += mma_k<F>) {
        unsigned fa[4], fb[2];
        for (int j = 0; j < 4; j++) {
            const T* p = ra + (j % 2) * size_t(8) * k + i;
            if constexpr (F == Operand::tf32) fa[j] = p[t + 4 * (j / 2)];
            else fa[j] = *reinterpret_cast<const unsigned*>(p + 2 * t + 8 * (j / 2));
        }
        for (int j = 0; j < 2; j++) {
            if constexpr (F == Operand::tf32) fb[j] = rb[i + t + 4 * j];
            else fb[j] = *reinterpret_cast<const unsigned*>(rb + i + 2 * t + 8 * j);
        }
        mma<F>(acc, fa, fb);
    }
    d[at] = acc[0], d[at + 1] = acc[1], d[below] = acc[2], d[below + 1] = acc[3];
}

#define MMA_KERNEL(NAME, F, T)                                                                               \
    extern "C" __global__ void NAME(const T* a, const T* b, const float* c, float* d, int n, int k) {        \
        mma_tile<F>(a, b, c, d, n, k);                                                                       \
    }
MMA_KERNEL(mma_bf16, Operand::bf16, unsigned short)
MMA_KERNEL(mma_fp16, Operand::fp16, unsigned short)
MMA_KERNEL(mma_tf32, Operand::tf32, unsigned)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kSpan = 64;  // of K per visit to shared memory, so up to four wgmma run without a wait between

// Rows × kSpan of x (row-major, K columns) as blocks of 8 rows × 16 bytes, blocks along K first.
template <int Rows>
inline void stage(unsigned short* to, const unsigned short* x, int k, int columns) {
    for (int i = threadIdx.x; i < Rows * columns; i += blockDim.x) {
        const int row = i / columns, column = i % columns;
        to[(row / 8 * (kSpan / 8) + column / 8) * 64 + row % 8 * 8 + column % 8] = x[size_t(row) * k + column];
    }
}

// One warpgroup per 64 × N tile of d, grid (n / N, M / 64). FromZero: c is not read.
template <Operand F, int N, bool RegistersA, bool FromZero>
inline void wgmma_tile(const unsigned short* a, const unsigned short* b, const float* c, float* d, int n, int k) {
    __shared__ alignas(128) unsigned short sa[64 * kSpan], sb[N * kSpan];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = blockIdx.y * 64 + warp * 16 + g;
    const size_t at = size_t(row) * n + blockIdx.x * N + 2 * t;
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = FromZero ? __int_as_float(0x7fffffff) : c[at + i / 4 * 8 + i % 2 + i % 4 / 2 * size_t(8) * n];
    for (int first = 0; first < k; first += kSpan) {
        const int span = min(kSpan, k - first);
        __syncthreads();
        stage<64>(sa, a + size_t(blockIdx.y) * 64 * k + first, k, span);
        stage<N>(sb, b + size_t(blockIdx.x) * N * k + first, k, span);
        fence_shared_for_wgmma();
        __syncthreads();
        unsigned fa[kSpan / 16][4] = {};
        if constexpr (RegistersA)
#pragma unroll
            for (int i = 0; i < kSpan / 4; i++)
                if (i / 4 * 16 < span)
                    fa[i / 4][i % 4] = *reinterpret_cast<const unsigned*>(
                        a + (row + i % 2 * size_t(8)) * k + first + i / 4 * 16 + 2 * t + i % 4 / 2 * 8);
        wgmma_hold(acc);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSpan / 16; i++)
            if (i * 16 < span) {
                const auto da = matrix_descriptor(shared_address(sa) + i * 256, 128, kSpan * 16);
                const auto db = matrix_descriptor(shared_address(sb) + i * 256, 128, kSpan * 16);
                if (FromZero && first == 0 && i == 0) {
                    if constexpr (RegistersA) wgmma<F, false, true>(acc, fa[i], db);
                    else wgmma<F, false, true>(acc, da, db);
                } else {
                    if constexpr (RegistersA) wgmma<F>(acc, fa[i], db);
                    else wgmma<F>(acc, da, db);
                }
            }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(acc);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[at + i / 4 * 8 + i % 2 + i % 4 / 2 * size_t(8) * n] = acc[i];
}

#define WGMMA_KERNEL(NAME, F, N, REGISTERS_A, FROM_ZERO)                                                     \
    extern "C" __global__ void __launch_bounds__(128) NAME(const unsigned short* a, const unsigned short* b, \
                                                           const float* c, float* d, int n, int k) {         \
        wgmma_tile<F, N, REGISTERS_A, FROM_ZERO>(a, b, c, d, n, k);                                          \
    }
WGMMA_KERNEL(wgmma_bf16_n8, Operand::bf16, 8, false, false)
WGMMA_KERNEL(wgmma_fp16_n8, Operand::fp16, 8, false, false)
WGMMA_KERNEL(wgmma_bf16_n64, Operand::bf16, 64, true, false)
WGMMA_KERNEL(wgmma_fp16_n64, Operand::fp16, 64, true, false)
WGMMA_KERNEL(wgmma_bf16_n128, Operand::bf16, 128, false, true)
WGMMA_KERNEL(wgmma_fp16_n128, Operand::fp16, 128, false, true)

#endif

// The function unit over a range of bit patterns: y[i] = f(first + i).
#define FUNCTION_KERNEL(NAME, PTX)                                                                           \
    extern "C" __global__ void NAME(unsigned first, unsigned count, unsigned* y) {                           \
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {   \
            float r;                                                                                         \
            asm(PTX " %0, %1;" : "=f"(r) : "f"(__uint_as_float(first + i)));                                 \
            y[i] = __float_as_uint(r);                                                                       \
        }                                                                                                    \
    }
FUNCTION_KERNEL(ex2_ftz, "ex2.approx.ftz.f32")
FUNCTION_KERNEL(ex2, "ex2.approx.f32")
FUNCTION_KERNEL(lg2_ftz, "lg2.approx.ftz.f32")
FUNCTION_KERNEL(lg2, "lg2.approx.f32")
