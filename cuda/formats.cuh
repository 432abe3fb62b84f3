// Number formats and rounding modes (numerics §1): the steps of cuflash/formats.py, bit for bit.
//
//     |x|  =  kept . fraction rest      in units of the format's last place at x
//     |y|  =  kept + (1 if the mode says up)
//
// Compile with -ftz=false: subnormals are kept.
#pragma once

// A mode says which inexact values go away from zero, as an expression over
//   fraction   top 32 bits of the discarded part
//   rest       whether a lower bit is set
//   odd        the last kept bit
//   negative   the sign
//   word       random bits, where needs_key
#define DEFINE_MODE(name, key, ...)                                                                \
    struct mode_##name {                                                                           \
        static constexpr bool needs_key = key;                                                     \
        static __device__ __forceinline__ bool up(unsigned fraction, bool rest, bool odd,          \
                                                  bool negative, unsigned word) {                  \
            return __VA_ARGS__;                                                                    \
        }                                                                                          \
    };

DEFINE_MODE(rne, false, fraction > 0x80000000u || (fraction == 0x80000000u && (rest || odd)))
DEFINE_MODE(rz, false, false)
DEFINE_MODE(rna, false, fraction >= 0x80000000u)
DEFINE_MODE(rd, false, negative)
DEFINE_MODE(ru, false, !negative)
DEFINE_MODE(sr, true, word < fraction)

template <class Mode> constexpr bool is_rne = false;
template <> constexpr bool is_rne<mode_rne> = true;

struct Split {
    unsigned kept, fraction;
    bool rest;
};

// sig / 2^shift, 0 <= shift <= 56, as integer part, top 32 bits of the fraction, and whether more is below.
__device__ __forceinline__ Split split(unsigned sig, int shift) {
    const unsigned long long wide = (unsigned long long)sig << 32, moved = wide >> shift;
    return {(unsigned)(moved >> 32), (unsigned)moved, moved << shift != wide};
}

template <class Mode>
__device__ __forceinline__ unsigned rounded(Split s, bool negative, unsigned word) {
    const bool inexact = s.fraction != 0 || s.rest;
    return s.kept + (inexact && Mode::up(s.fraction, s.rest, s.kept & 1, negative, word));
}

// x in the format eEmM (IEEE layout), or, where it saturates, in fp8_e4m3: no Inf, overflow gives ±max.
// word: random bits for a mode that needs a key.
template <int E, int M, class Mode, bool saturates = false>
__device__ __forceinline__ float round_to(float x, unsigned word = 0) {
    static_assert(2 <= E && E <= 8 && 1 <= M && M <= 23, "eXmY: 2 <= X <= 8, 1 <= Y <= 23");
    static_assert(!saturates || (E == 4 && M == 3), "only fp8_e4m3 saturates");
    if constexpr (E == 8 && M == 23) return x;

#ifdef __CUDA_ARCH__
    // One instruction with the same bits.
    if constexpr (is_rne<Mode> && E == 8 && M == 7) {
        unsigned short h;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
        return __uint_as_float((unsigned)h << 16);
    }
    if constexpr (is_rne<Mode> && E == 5 && M == 10) {
        unsigned short h;
        float y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(h));
        return y;
    }
#endif
    if constexpr (is_rne<Mode> && E == 8) {  // the range is fp32's: a carry moves into the exponent, up to Inf
        constexpr unsigned unit = 1u << (23 - M);
        const unsigned bits = __float_as_uint(x);
        const unsigned y = (bits + (unit / 2 - 1) + (bits / unit & 1)) & ~(unit - 1);
        return (bits & 0x7FFFFFFFu) > 0x7F800000u ? x : __uint_as_float(y);
    }

    constexpr int bias = (1 << (E - 1)) - 1, emin = 1 - bias, emax = bias + saturates;
    constexpr int drop = 23 - M;                                   // mantissa bits that a normal number loses
    constexpr unsigned infinity = 0x7F800000u;
    constexpr unsigned tiny = E < 8 ? (emin + 127) << 23 : 0;      // bits of the smallest normal number,
    constexpr unsigned huge = (unsigned)(emax + 1 + 127) << 23;    // of the power of two beyond the format,
    constexpr unsigned top = huge - ((saturates ? 2u : 1u) << drop);  // of its largest number

    const unsigned bits = __float_as_uint(x), a = bits & 0x7FFFFFFFu;
    const bool negative = bits >> 31;
    unsigned y;
    if (a < tiny) {
        // Below the format's normal range the last place stays where it is.
        const int exponent = a >> 23;
        const unsigned sig = (a & 0x7FFFFFu) | (exponent > 0 ? 0x800000u : 0u);
        const int shift = drop + emin + 127 - (exponent > 1 ? exponent : 1);
        const unsigned kept = rounded<Mode>(split(sig, shift < 56 ? shift : 56), negative, word);
        const float smallest = __uint_as_float(E < 8 ? (unsigned)(emin - M + 127) << 23 : 0u);
        y = __float_as_uint(__fmul_rn(__uint2float_rn(kept), smallest));
    } else {
        // Normal numbers: the exponent rides on the kept bits, so a carry moves into it.
        y = rounded<Mode>(split(a, drop), negative, word) << drop;
    }
    if (a >= infinity) {
        y = saturates && a == infinity ? top : a;
    } else if (y > top) {
        const bool up = a < huge || Mode::up(0xFFFFFFFFu, true, true, negative, word);
        y = saturates || Mode::needs_key || !up ? top : infinity;
    }
    return __uint_as_float(y | (bits & 0x80000000u));
}
