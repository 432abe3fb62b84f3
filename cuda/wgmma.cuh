#pragma once
// One warpgroup's matrix product on sm_90a: D (64 × N, fp32) += A (64 × 16) · B (16 × N), bf16 or fp16.
// The same arithmetic as mma.sync: one call is one group of numerics.md section 5.
//
// D: warp w of four has rows 16w to 16w + 15; d[4j … 4j + 3] is mma.cuh's fragment C at columns 8j to 8j + 7.
// A comes from registers (each warp mma.cuh's fragment A of its 16 rows) or shared memory, B from shared.

#include "copy.cuh"
#include "mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// How rows lie in shared memory: whole, or as 32, 64 or 128 bytes whose 16-byte chunks are permuted by row.
enum class Swizzle : unsigned long long { none = 0, b128 = 1, b64 = 2, b32 = 3 };

// A matrix descriptor (PTX ISA, "Matrix descriptor format"). Offsets in bytes, multiples of 16. Without
// swizzle, K contiguous: 8 rows × 16 bytes lie together as 128 bytes; `leading` is the distance of two such
// blocks along K, `stride` along M or N.
inline unsigned long long matrix_descriptor(unsigned shared, unsigned leading, unsigned stride,
                                            Swizzle swizzle = Swizzle::none) {
    using u64 = unsigned long long;
    return (shared & 0x3FFFF) >> 4 | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(swizzle) << 62;
}

// Before the first wgmma, and after registers of D or A were written otherwise.
inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Pending>
inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Makes ordinary stores to shared memory visible to wgmma, in the writing thread, before the barrier.
inline void fence_shared_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from moving D while wgmma is writing it.
template <int Count>
inline void wgmma_hold(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// wgmma<operand, N-contiguous B, from zero>(d, a, b): d += A·B, or d = A·B where `FromZero`.

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D32(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12), D4(i + 16), D4(i + 20), D4(i + 24), D4(i + 28)
#define D_8 D4(0)
#define D_64 D32(0)
#define D_128 D32(0), D32(32)
#define LIST_8 "%0, %1, %2, %3"
#define LIST_64                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_128                                                                                             \
    LIST_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// I0 … I6 count on from the registers of D. The last arguments are the operands of A.
#define WGMMA_ASM(N, TYPE, A, TRANS_A, B, TRANS_B, ZERO, ...)                                                \
    asm volatile("{.reg .pred add; setp.eq.b32 add, %" #ZERO ", 0; wgmma.mma_async.sync.aligned.m64n" #N     \
                 "k16.f32." TYPE "." TYPE " {" LIST_##N "}, " A ", %" #B ", add, 1, 1, " TRANS_A             \
                 "%" #TRANS_B ";}"                                                                           \
                 : D_##N : __VA_ARGS__, "l"(b), "n"(int(TransB)), "n"(int(FromZero)) : "memory")
#define WGMMA(N, I0, I1, I2, I3, I4, I5, I6)                                                                 \
    template <Operand F, bool TransB = false, bool FromZero = false>                                         \
    inline void wgmma(float (&d)[N / 2], unsigned long long a, unsigned long long b) {                       \
        if constexpr (F == Operand::bf16) WGMMA_ASM(N, "bf16", "%" #I0, "0, ", I1, I2, I3, "l"(a));          \
        if constexpr (F == Operand::fp16) WGMMA_ASM(N, "f16", "%" #I0, "0, ", I1, I2, I3, "l"(a));           \
    }                                                                                                        \
    template <Operand F, bool TransB = false, bool FromZero = false>                                         \
    inline void wgmma(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {                     \
        if constexpr (F == Operand::bf16)                                                                    \
            WGMMA_ASM(N, "bf16", "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}", "", I4, I5, I6,                 \
                      "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                                           \
        if constexpr (F == Operand::fp16)                                                                    \
            WGMMA_ASM(N, "f16", "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}", "", I4, I5, I6,                  \
                      "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                                           \
    }

WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA(128, 64, 65, 66, 67, 68, 69, 70)

#undef WGMMA
#undef WGMMA_ASM
#undef LIST_128
#undef LIST_64
#undef LIST_8
#undef D_128
#undef D_64
#undef D_8
#undef D32
#undef D4

#endif
