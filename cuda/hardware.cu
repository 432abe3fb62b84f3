// What the hardware itself computes, for tests/gpu/test_hardware.py: tensor cores (numerics.md section 5)
// and the function unit (section 6). Nothing in the library calls these.

#include "functions.cuh"
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
        const int block = row / 8 * (kSpan / 8) + column / 8;
        to[block * 64 + row % 8 * 8 + column % 8] = x[size_t(row) * k + column];
    }
}

// One warpgroup per 64 × N tile of d, grid (n / N, M / 64). FromZero: c is not read.
template <Operand F, int N, bool RegistersA, bool FromZero>
inline void wgmma_tile(const unsigned short* a, const unsigned short* b, const float* c, float* d, int n,
                       int k) {
    __shared__ alignas(128) unsigned short sa[64 * kSpan], sb[N * kSpan];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = blockIdx.y * 64 + warp * 16 + g;
    const size_t at = size_t(row) * n + blockIdx.x * N + 2 * t;
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = FromZero ? __int_as_float(0x7fffffff)
                          : c[at + i / 4 * 8 + i % 2 + i % 4 / 2 * size_t(8) * n];
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

// The function unit over a range of bit patterns, y[i] = f(first + i), and against the model of
// cuflash/mufu.py over all 2^32 of them: `wrong` counts, `example` is one of those arguments.

// digits: of 2^f for the 23-bit fractions f.
inline float ex2_model(float x, const int* digits) {
    if (x != x) return __int_as_float(0x7fffffff);
    const bool halved = x < -126;
    const float t = fminf(fmaxf(halved ? x * 0.5f : x, -128.f), 128.f);
    int fixed = int(fabsf(t) * 0x1p23f);
    if (t < 0) fixed = (fixed & 0x7fffff) ? ~fixed : -fixed;
    const int bits = (fixed & ~0x7fffff) + (127 << 23) + digits[fixed & 0x7fffff];
    const float y = fixed < -126 * (1 << 23) ? 0 : __int_as_float(bits);
    return halved ? y * y : y;
}

// values: of log2(1 + f), in units of 2^-36.
inline float lg2_model(float x, const long long* values) {
    if (!(x >= 0)) return __int_as_float(0x7fffffff);
    if (x == 0) return __int_as_float(0xff800000);
    if (x == 1) return 0;
    const bool subnormal = x < 0x1p-126f;
    const unsigned bits = __float_as_uint(subnormal ? x * 0x1p24f : x);
    const int exponent = int(bits >> 23) - 127;
    if (exponent == 128) return x;
    const long long value = (static_cast<long long>(exponent) << 36) + values[bits & 0x7fffff];
    const float y = value < 0 ? -__ll2float_rz(-value - 1) : __ll2float_rz(value);
    return subnormal ? y * 0x1p-36f - 24 : y * 0x1p-36f;
}

#define FUNCTION_KERNELS(NAME, TABLE)                                                                        \
    extern "C" __global__ void NAME##_range(unsigned first, unsigned count, unsigned* y) {                   \
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)     \
            y[i] = __float_as_uint(NAME##_mufu(__uint_as_float(first + i)));                                        \
    }                                                                                                        \
    extern "C" __global__ void NAME##_compare(const TABLE* table, unsigned long long* wrong,                 \
                                              unsigned* example) {                                           \
        const unsigned threads = gridDim.x * blockDim.x; /* a power of two */                                \
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;                                                  \
        const unsigned last = i - threads;                                                                   \
        for (;; i += threads) {                                                                              \
            const float x = __uint_as_float(i);                                                              \
            if (__float_as_uint(NAME##_mufu(x)) != __float_as_uint(NAME##_model(x, table)))                         \
                atomicAdd(wrong, 1ull), *example = i;                                                        \
            if (i == last) break;                                                                            \
        }                                                                                                    \
    }
FUNCTION_KERNELS(ex2, int)
FUNCTION_KERNELS(lg2, long long)
