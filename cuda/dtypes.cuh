// The dtypes of arrays in global memory.
#pragma once

#include "sites.cuh"

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

inline float value(float x) { return x; }
inline float value(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline float value(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// x, a value of the dtype, so that nothing is rounded here.
inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) { to->bits = pack<Operand::bf16>(x, 0) & 0xFFFF; }
inline void store(fp16* to, float x) { to->bits = pack<Operand::fp16>(x, 0) & 0xFFFF; }

inline void store_two(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
inline void store_two(bf16* to, float x, float y) { *reinterpret_cast<unsigned*>(to) = pack<Operand::bf16>(x, y); }
inline void store_two(fp16* to, float x, float y) { *reinterpret_cast<unsigned*>(to) = pack<Operand::fp16>(x, y); }
