// What the kernels of attention's backward share: their arguments, and P and dS of one element.
#pragma once

#include "dtypes.cuh"
#include "functions.cuh"
#include "tiles.cuh"

// ---- arguments

// What a query row brings to its elements: x = S·c − base (or S − base), dS = P·(dP − delta).
struct alignas(8) Row {
    float base, delta;
};

// The base of an empty row: a NaN that no operation gives.
constexpr unsigned empty_base = 0x7FC0E397u;
inline bool is_empty(float base) { return __float_as_uint(base) == empty_base; }

struct Args {
    Array<const void> q, k, v, dout;  // operands: rounded, as OPERAND or fp32
    Array<void> dq, dk, dv;           // results
    Row* rows;                        // (batch · heads, padded_rows)
    float* inv_l;                     // likewise, 1/l; under p_bwd_from = m_l
    void *p, *ds;                     // scratch of `count` heads and rows row0 to row1
    float *dk_head, *dv_head;  // (batch · heads, tk, d) fp32: running sums, then each query head's share
    const int* heads;          // the query heads of this launch; null: all of them
    long long padded_rows;
    int listed;        // how many heads these are
    int first, count;  // (sample, head) pairs of this launch, sample · listed + i
    int together;      // pairs whose blocks run mixed
    int tq, tk, d, causal;
    int row0, row1;              // query rows of this launch
    int begins, ends;            // whether sums start here, whether they are complete after
    int n_heads, group;          // query heads in all, and per key/value head
    int pairs;                   // whether rows of all results start at even elements
    int k_per_head, v_per_head;  // whether the operands k and v lie per query head
    float scale, c;              // α and fl(α·log₂e)
    unsigned seed_low, seed_high, step, layer, sample;

    // Where a head's dk_head and dv_head begin.
    long long sums_of(int pair) const { return (long long)pair * tk * d; }
    Shape shape() const { return {tq, tk, causal != 0}; }
};

static_assert(sizeof(Args) == 384, "as _ARGS of cuflash/attention_backward.py packs it");

// A block's pair and its tile of keys or rows. Blocks start in ascending order: those of a few pairs by tile, so
// that under a causal mask long ones start first; not of all pairs, so that what they read stays in L2.
struct Turn {
    int slot, tile;

    Turn(const Args& args, int tiles) {
        const int group = blockIdx.x / (args.together * tiles),
                  within = blockIdx.x - group * args.together * tiles;
        const int pairs = min(args.together, args.count - group * args.together);
        tile = within / pairs;
        slot = group * args.together + within - tile * pairs;
    }
};

// One (sample, head) of a launch.
struct Place {
    int sample, head, kv, pair, slot;  // pair: sample · n_heads + head; slot: its place in the scratch

    Place(const Args& args, int slot_) : slot(slot_) {
        const int i = args.first + slot;
        sample = i / args.listed;
        const int listed = i - sample * args.listed;
        head = args.heads ? args.heads[listed] : listed;
        kv = head / args.group;
        pair = sample * args.n_heads + head;
    }

    At at(const Args& args) const {
        At at{};
        at.seed = make_uint2(args.seed_low, args.seed_high);
        at.step = args.step, at.layer = args.layer, at.sample = args.sample + sample, at.head = head;
        return at;
    }

    template <class T>
    const T* rows_of(const Array<const void>& array, bool per_kv) const {
        return static_cast<const T*>(array.data) + sample * array.batch + (per_kv ? kv : head) * array.head;
    }
};

// ---- one element

// e^x, or 2^x under `fa2`.
inline float exponential(float x) {
    if constexpr (exp_mufu) return ex2_mufu(order_fa2 ? x : x * functions::LOG2E);
    else return order_fa2 ? exp2_defined(x) : exp_defined(x);
}

// The same where |x| <= narrow, which keeps the result from overflow and from subnormals.
constexpr float narrow = order_fa2 ? 125.f : 86.f;
inline float exponential_narrow(float x) {
    if constexpr (exp_mufu) return ex2_mufu<true>(order_fa2 ? x : x * functions::LOG2E);
    else return order_fa2 ? exp2_narrow(x) : exp_narrow(x);
}

// The argument of exp, from the dot product S.
inline float exponent(float s, float base, const Args& args, const At& at) {
    s = rnd<attn_s>(s, at);
    s = order_fa2 ? s * args.c : rnd<attn_s_scaled>(s * args.scale, at);
    return rnd<attn_x_bwd>(s - base, at);
}

// P before its rounding.
inline float probability(float s, float base, float inv_l, const Args& args, const At& at) {
    const float p = exponential(exponent(s, base, args, at));
    return p_bwd_from_m_l ? p * inv_l : p;
}

// dS before its rounding, from P and the dot product dP.
inline float score_gradient(float p, float dp, float delta, const Args& args, const At& at) {
    p = rnd<attn_p_ds>(p, at);
    const float dpd = rnd<attn_dpd>(rnd<attn_dp>(dp, at) - delta, at);
    return order_fa2 ? p * dpd : (p * args.scale) * dpd;
}

// Two values rounded at a site and packed as an operand: one instruction where the formats are the same.
template <class S, Operand F>
inline unsigned rnd_two(float x, float y, const At& at_x, const At& at_y) {
    if constexpr (!tapped && S::template is_operand<F>)
        return pack<F>(x, y);
    else
        return pack<F>(rnd<S>(x, at_x), rnd<S>(y, at_y));
}

// ---- a finished gradient

// dQ, dK or dV of a query head before it is returned.
template <class Site>
inline float finished(float x, bool scaled, const Args& args, const At& at) {
    return rnd<Site>(order_fa2 && scaled ? x * args.scale : x, at);
}

// Elements `column` (even) and the next, if there is one, of a row of d.
template <class T>
inline void store_pair(T* row, int column, float x, float y, const Args& args) {
    if (args.pairs) {
        store_two(row + column, x, y);
    } else {
        store(row + column, x);
        if (column + 1 < args.d) store(row + column + 1, y);
    }
}
