// Rounding sites in kernels: rnd<attn_p>(x, at), the one way a value is rounded, as rnd("attn.p", x) is in
// cuflash/sites.py. "precision.cuh" is not a file: cuflash/kernel_header.py writes it for each precision, a
// line a site, with the switches, the numeric tiles, the products and the fix.
#pragma once

#include "formats.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "taps.cuh"

// Where a value lies, for modes that draw random words. A site that draws none leaves all of it unused.
struct At {
    uint2 seed;
    unsigned step, layer, sample, head;  // sample counts over the whole run
    unsigned row, col, tile;

    At operator()(unsigned new_row, unsigned new_col = 0) const {
        At at = *this;
        at.row = new_row, at.col = new_col;
        return at;
    }
};

// A call: inlined, the general rounding is up to a hundred instructions for each element of a thread, and
// compilation takes a minute.
template <int E, int M, class Rule, bool saturates>
__noinline__ float round_call(float x) {
    return round_to<E, M, Rule, saturates>(x);
}

template <int E, int M, class Rule, bool saturates>
__noinline__ float round_keyed_call(float x, uint2 key, unsigned row, unsigned col, unsigned tile) {
    return round_to<E, M, Rule, saturates>(x, random_word(key, row, col, tile));
}

// The compiler asks once for all elements of a site.
__noinline__ uint2 subkey_call(uint2 seed, unsigned step, unsigned sample, unsigned layer, unsigned head, unsigned id) {
    return subkey(seed, step, sample, layer, head, id);
}

// per_tile: the numeric tile is part of the place (not so for values of a query and a key, whose words must
// not depend on tiles, as backward recomputes them under others).
template <int E, int M, class Rule, bool saturates, unsigned id, bool per_tile>
struct Site {
    static constexpr unsigned number = id;
    static constexpr bool is_fp32 = E == 8 && M == 23;
    static constexpr bool is_bf16_rne = E == 8 && M == 7 && is_rne<Rule>;
    static constexpr bool is_fp16_rne = E == 5 && M == 10 && is_rne<Rule>;
    static constexpr bool is_short = is_fp32 || E == 8 && is_rne<Rule> || is_fp16_rne;  // a few instructions

    static float round(float x, const At& at) {
        if constexpr (is_bf16_rne) return round_bf16(x);
        else if constexpr (is_short) return round_to<E, M, Rule, saturates>(x);
        else if constexpr (Rule::needs_key)
            return round_keyed_call<E, M, Rule, saturates>(
                x, subkey_call(at.seed, at.step, at.sample, at.layer, at.head, id), at.row, at.col,
                per_tile ? at.tile : 0);
        else return round_call<E, M, Rule, saturates>(x);
    }

    // Whether packing as this operand is the rounding.
    template <Operand F>
    static constexpr bool is_operand = F == Operand::bf16 && is_bf16_rne || F == Operand::fp16 && is_fp16_rne;

    // A pair's high half, beside zero, is the rounded value as fp32: one instruction at four times the rate of
    // cvt.rn.bf16.f32, and nothing to shift.
    static float round_bf16(float x) {
        unsigned pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.f));
        return __uint_as_float(pair);
    }

    // To nearest whatever the site's mode: for thresholds compared with its values.
    static float nearest(float x) { return Site<E, M, mode_rne, saturates, id, per_tile>::round(x, At{}); }

    static float down(float x) { return Site<E, M, mode_rd, saturates, id, per_tile>::round(x, At{}); }

    // Whether this site leaves values of another as they are.
    template <class Other>
    static constexpr bool keeps = is_fp32 || Other::template same_format<E, M, saturates>;
    template <int E2, int M2, bool saturates2>
    static constexpr bool same_format = E == E2 && M == M2 && saturates == saturates2;
};

// time: which of several roundings of the same place, for taps.
template <class S, unsigned time = 0>
float rnd(float x, const At& at) {
    const float y = S::round(x, at);
#ifdef TAPS
    tap(taps[S::number], x, y, at.sample, at.head, at.row, at.col, at.tile, time);
#endif
    return y;
}

// One line of precision.cuh each.
#define SITE(name, E, M, mode, saturates, id, per_tile) using name = Site<E, M, mode_##mode, saturates, id, per_tile>;

// A matrix product: on tensor cores with operands of one format, or `sequential` (numerics, section 5).
template <Operand F, bool is_sequential>
struct Product {
    static constexpr Operand operand = F;
    static constexpr bool sequential = is_sequential;
    static constexpr bool half = !is_sequential && F != Operand::tf32;  // 16-bit operands
};
#define PRODUCT(name, operand) using product_##name = Product<Operand::operand, false>;
#define SEQUENTIAL_PRODUCT(name) using product_##name = Product<Operand::tf32, true>;

enum class DeltaFrom { o, o_unrounded, o_fp32, p_dp };

#include "precision.cuh"

// ---- 16-bit pairs

// Two values as an operand's pair, the first in the low half. Exact for values of the format; otherwise RNE.
template <Operand F>
unsigned pack(float low, float high) {
    unsigned pair;
    if constexpr (F == Operand::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <Operand F>
float2 unpack(unsigned pair) {
    if constexpr (F == Operand::bf16)
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
    float2 x;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(x.x), "=f"(x.y) : "r"(pair));
    return x;
}

// Two neighbours of a row, rounded at a site and packed: one instruction where the formats are the same.
template <class S, Operand F>
unsigned rnd_pack(float low, float high, const At& at) {
    if constexpr (!tapped && S::template is_operand<F>)
        return pack<F>(low, high);
    else
        return pack<F>(rnd<S>(low, at), rnd<S>(high, at(at.row, at.col + 1)));
}
