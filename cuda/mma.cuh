#pragma once
// One warp's matrix product on tensor cores: C (16 × 8, fp32) += A (16 × K) · B (K × 8), K = 16 for bf16
// and fp16, 8 for tf32. One call is one group of numerics.md section 5 (on sm_80, two: the tensor core
// takes half of K at a time).
//
// Fragments (PTX ISA, "Matrix Fragments for mma"), with g = lane / 4, t = lane % 4:
//   C: c[0], c[1] at row g, columns 2t, 2t + 1;  c[2], c[3] at row g + 8
//   A, 16 bit: a[0] row g, columns 2t, 2t + 1;  a[1] row g + 8;  a[2], a[3] these at columns 2t + 8, 2t + 9
//   B, 16 bit: b[0] rows 2t, 2t + 1 of column g;  b[1] rows 2t + 8, 2t + 9
//   A, tf32:   a[0] row g, column t;  a[1] row g + 8;  a[2], a[3] these at column t + 4
//   B, tf32:   b[0] row t of column g;  b[1] row t + 4
// So a 16 × 16 tile of C, rounded and packed in pairs, is an A fragment as it lies.

enum class Operand { bf16, fp16, tf32 };

// Products per call along K.
template <Operand F>
constexpr int mma_k = F == Operand::tf32 ? 8 : 16;

template <Operand F>
inline void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#define MMA(SHAPE, TYPE)                                                                                     \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                                      \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                    \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (F == Operand::bf16) MMA("m16n8k16", "bf16");
    if constexpr (F == Operand::fp16) MMA("m16n8k16", "f16");
    if constexpr (F == Operand::tf32) MMA("m16n8k8", "tf32");
#undef MMA
}

// Four products in order, on the CUDA cores.
inline void fma4(float& c, float4 a, float4 b) {
    c = __fmaf_rn(a.x, b.x, c);
    c = __fmaf_rn(a.y, b.y, c);
    c = __fmaf_rn(a.z, b.z, c);
    c = __fmaf_rn(a.w, b.w, c);
}
