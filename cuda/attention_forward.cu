// Forward of attention: the twin of cuflash/attention_forward.py, to the bit.
//
//     S = α·QKᵀ    P̄ = exp(S − m)    O = P̄V / l    L = m + log l
//
// A block owns ROWS · WARPS query rows of one head and walks over the numeric tiles of keys that they visit.
// A warp owns whole rows, in fragments of mma.cuh: a thread has rows g and g + 8 of each 16 and columns 2t,
// 2t + 1 of each 8, just the columns of one of the four partial row sums. What the block executes at once,
// KEYS, is the numeric tile where registers hold it; a longer tile is gone through twice (three times for
// `plain`, and for fixes with a tolerance), first for its maximum.
//
// Macros: HEAD_DIM; ROWS (of a warp), WARPS, KEYS, STAGES (of shared memory), BLOCKS (of an SM, at least);
// WARPGROUP, whether warpgroups multiply; SPLIT, the number of blocks that share the columns of O; IN, OUT,
// dtypes (float, bf16, fp16); DIRECT, whether q, k, v are operands as they lie; COUNT, whether ties are counted;
// SCALE_IN_BF16, whether α is a bf16 number.
#include "arrays.cuh"
#include "functions.cuh"

constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16;  // in shared memory, zeros beyond the head dim
constexpr int UNIT = WARPGROUP ? 64 : 16;           // columns of a panel; of two fragments
constexpr int V_COLUMNS = (COLUMNS + UNIT * SPLIT - 1) / (UNIT * SPLIT) * UNIT;  // of a block
constexpr int THREADS = 32 * WARPS, BLOCK_ROWS = ROWS * WARPS;
constexpr int M = ROWS / 16, R = 2 * M;             // fragments of 16 rows; rows of a thread
constexpr int N = KEYS / 8, C = V_COLUMNS / 8;      // fragments of 8 columns: of S, of O
constexpr int bc = tile_forward_bc;
constexpr bool one_chunk = bc == KEYS;              // the numeric tile is executed at once
constexpr bool raw_is_m = !fix::active && attn_m::is_fp32;  // no need to keep both
constexpr bool counts_ties = COUNT || fix::active;
static_assert(one_chunk || bc == 0 || bc > KEYS, "KEYS is at most the tile");
static_assert(KEYS % 16 == 0);

using QTile = SharedTile<product_s, BLOCK_ROWS, COLUMNS>;
using KTile = SharedTile<product_s, KEYS, COLUMNS>;
using VTile = SharedTile<product_pv, KEYS, V_COLUMNS>;

struct Parameters {
    Array<const IN> q, k, v;
    Array<OUT> o;
    Array<float> o_unrounded;            // data may be null, like the next three
    float *lse, *m, *l;                  // (batch, heads, Tq)
    unsigned long long* stats;           // rows with ties, changed by the fix, limited by its cap
    long long heads, first_head, head_count, group;
    long long tq, tk, causal, aligned;   // aligned: rows of o start at even elements
    unsigned long long seed;
    long long step, layer, sample;
    float scale, base2_scale;            // α; fl(α·log₂e) under `fa2`
};

constexpr float INF = __builtin_bit_cast(float, 0x7F800000u);

// e^x, or 2^x under `fa2`. small: x <= 40 or NaN is known.
template <bool small>
float exponential(float x) {
    if constexpr (exp_mufu) return ex2_mufu(order_fa2 ? x : x * functions::LOG2E);
    else return order_fa2 ? exp2_defined<small>(x) : exp_defined<small>(x);
}

// S and α·S in bf16 by one instruction each for two of them: a product of bf16 numbers is rounded once.
constexpr bool scales_pairs =
    SCALE_IN_BF16 && !order_fa2 && !tapped && attn_s::is_bf16_rne && attn_s_scaled::is_bf16_rne;

inline void scale_pair(float (&s)[4], int e, float scale) {
    unsigned pair = pack<Operand::bf16>(s[e], s[e + 1]);
    const unsigned by = pack<Operand::bf16>(scale, scale), minus_zero = 0x80008000u;  // which keeps the sign of zeros
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(by), "r"(minus_zero));
    const float2 x = unpack<Operand::bf16>(pair);
    s[e] = x.x, s[e + 1] = x.y;
}

// The same bits where abs x is known to be at most `narrow`, so that no result is subnormal.
inline float exponential_narrow(float x) {
    if constexpr (exp_mufu) return ex2_mufu<true>(order_fa2 ? x : x * functions::LOG2E);
    else return order_fa2 ? exp2_narrow(x) : exp_narrow(x);
}
constexpr float narrow = order_fa2 ? 124 : 85;
// attn.x is rounded so finely that exponents stay near what the tile's extremes say of them.
constexpr bool has_narrow = attn_x::is_fp32 || attn_x::is_bf16_rne || attn_x::is_fp16_rne;

inline float logarithm(float x) { return exp_mufu ? lg2_mufu(x) * functions::LN2 : log_defined(x); }

// S at its last site never exceeds m unless m is rounded more coarsely, or a fix may lower it.
template <bool> struct Last { using S = attn_s_scaled; };
template <> struct Last<true> { using S = attn_s; };
using LastS = Last<order_fa2>::S;
constexpr bool m_is_maximum = !fix::active && attn_m::keeps<LastS>;

// Over the four threads of a row. The sum is (s0 + s2) + (s1 + s3) in each.
float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 2);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 1);
}

int quad_sum(int x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 2);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 1);
}

float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
}

// A warp's rows. Row r of a thread, r = 2i + h, is row g + 8h of fragment i.
struct Rows {
    const Parameters& p;
    Shape shape;
    At at;
    int row0, end;               // first row; end of the last key tile visited
    unsigned q_shared;
    float o[M][C][4], m[R], raw[R], l[R];  // raw: maximum before fix and rounding
    int ties[R];                 // of raw, for fixes that run over tiles
    unsigned tied = 0, changed = 0, limited = 0;  // bit r: a row's flag
    mutable int key_end = 0;     // of the S in registers; under taps. Keys beyond it are another tile's

    __forceinline__ int row(int r) const { return row0 + threadIdx.x % 32 / 4 + r * 8; }
    __forceinline__ int column(int j, int e) const { return j * 8 + threadIdx.x % 4 * 2 + e; }
    // The place of a key in row r. Taps have none for keys from key_end on, which a later tile has shown.
    __forceinline__ At at_key(int r, int key) const { return at(row(r), tapped && key >= key_end ? not_there : key); }

    __forceinline__ float raw_maximum(int r) const { return raw_is_m ? m[r] : raw[r]; }

    __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < R; r++) m[r] = raw[r] = -INF, l[r] = 0, ties[r] = 0;
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < C; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][j][e] = 0;
    }

    // S = QKᵀ; a warpgroup only begins it.
    __forceinline__ void multiply(float (&s)[M][N][4], unsigned k_shared) const {
        product_rows<product_s, QTile, KTile, COLUMNS>(s, q_shared, k_shared);
    }

    // S of the keys from k0 on, rounded and scaled; -Inf where masked and from k1 on.
    __forceinline__ void scores(float (&s)[M][N][4], int k0, int k1) const {
        if constexpr (tapped) key_end = k1;
        product_wait(s);
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if constexpr (scales_pairs) {
                        if (e % 2 == 0) scale_pair(s[i][j], e, p.scale);
                        continue;
                    }
                    float& x = s[i][j][e];
                    const At here = at_key(2 * i + e / 2, k0 + column(j, e % 2));
                    x = rnd<attn_s>(x, here);
                    if constexpr (!order_fa2) x = rnd<attn_s_scaled>(x * p.scale, here);
                }
        if (shape.last_key(row0) >= k0 + KEYS - 1 && k0 + KEYS <= k1) return;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int last = min(shape.last_key(row(r)), k1 - 1) - k0;
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (column(j, e) > last) s[r / 2][j][r % 2 * 2 + e] = -INF;
        }
    }

    // This thread's maximum of a row. A NaN logit takes no part in it.
    __forceinline__ float maximum(const float (&s)[M][N][4], int r, float x = -INF) const {
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) x = fmaxf(x, s[r / 2][j][r % 2 * 2 + e]);
        return x;
    }

    // A row's maximum in the tile. As integers, positive floats are in order, and negative ones in order of
    // magnitude: three-way integer maxima give the largest, if it is positive, and the least, `low`, if it is
    // negative, at half the cost of fmaxf. low is 0 if no entry is negative, -Inf or NaN if one is not finite.
    __forceinline__ float tile_maximum(const float (&s)[M][N][4], int r, float& low) const {
        int high = static_cast<int>(0x80000000);
        unsigned least = 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float* x = s[r / 2][j] + r % 2 * 2;
            high = max(max(high, __float_as_int(x[0])), __float_as_int(x[1]));
            if constexpr (has_narrow) least = max(max(least, __float_as_uint(x[0])), __float_as_uint(x[1]));
        }
#pragma unroll
        for (int lane = 2; lane; lane /= 2) {
            high = max(high, __shfl_xor_sync(0xFFFFFFFFu, high, lane));
            if constexpr (has_narrow) least = max(least, __shfl_xor_sync(0xFFFFFFFFu, least, lane));
        }
        const bool positive = high >= 0 && high < 0x7F800000;
        low = !positive ? -INF : least >> 31 ? __uint_as_float(least) : 0.f;
        if (__all_sync(0xFFFFFFFFu, positive)) return __int_as_float(high);
        return quad_max(maximum(s, r));
    }

    // This thread's entries of a row within ε of its maximum.
    __forceinline__ int count_ties(const float (&s)[M][N][4], int r, float r_m) const {
        const float epsilon = order_fa2 ? fix::epsilon / p.scale : fix::epsilon;
        const float threshold = LastS::nearest(r_m - epsilon);
        int n = 0;
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float x = s[r / 2][j][r % 2 * 2 + e];
                if constexpr (fix::epsilon == 0)  // two instructions; the compiler's n += x == r_m takes three
                    asm("{.reg .pred p; setp.eq.f32 p, %1, %2; @p add.s32 %0, %0, 1;}" : "+r"(n) : "f"(x), "f"(r_m));
                else if constexpr (fix::rounded_threshold) n += x >= threshold && x > -INF;
                else n += r_m - x <= epsilon && x > -INF;
            }
        return n;
    }

    // m after a tile whose maximum is r_m, `n` entries tying for it; the fix acts here.
    __forceinline__ float new_maximum(int r, float r_m, int n) {
        r_m += 0.f;  // -0 becomes +0
        if constexpr (fix::running) {
            n = r_m > raw[r] ? n : r_m == raw[r] ? ties[r] + n : ties[r];
            r_m = fmaxf(r_m, raw[r]);
            ties[r] = n;
        }
        if constexpr (!raw_is_m) raw[r] = fmaxf(r_m, raw[r]);
        float m_tile = r_m;
        if (counts_ties && n > 1 && fabsf(r_m) < INF) {
            tied |= 1u << r;
            if constexpr (fix::active) {
                const float given = order_fa2 ? r_m * p.scale : r_m, wanted = fix::rule(given, n);
                if (wanted != given) m_tile = order_fa2 ? wanted / p.scale : wanted;
                if constexpr (fix::rounds_down) m_tile = fmaxf(r_m, attn_m::down(m_tile));
                if (m_tile != r_m) changed |= 1u << r;
                if (fix::limited(given, n)) limited |= 1u << r;
            }
        }
        const At here = at(row(r));
        return rnd<attn_m, 1>(functions::max_nan(m[r], rnd<attn_m>(m_tile, here)), here);
    }

    // Moves a row to its new maximum: l is scaled (under `fa2`, by its next addition), alpha is for O.
    __forceinline__ float move(int r, float m_new) {
        const At here = at(row(r));
        const float dm = rnd<attn_dm>(m[r] - (m_new == -INF ? 0.f : m_new), here);
        const float alpha = rnd<attn_alpha>(exponential<true>(order_fa2 ? dm * p.base2_scale : dm), here);
        if constexpr (!order_fa2) l[r] = rnd<attn_l_scaled>(alpha * l[r], here);
        m[r] = m_new;
        return alpha;
    }

    __forceinline__ float exponent(float s, int r) const {
        const float m0 = m[r] == -INF ? 0.f : m[r];
        return order_fa2 ? s * p.base2_scale - m0 * p.base2_scale : s - m0;
    }

    // Moves a row to its maximum after a tile whose S is in registers. is_narrow: whether all its exponents are.
    __forceinline__ float take_maximum(const float (&s)[M][N][4], int r, bool& is_narrow) {
        float low;
        const float r_m = tile_maximum(s, r, low);
        const float alpha = move(r, new_maximum(r, r_m, counts_ties ? quad_sum(count_ties(s, r, r_m)) : 0));
        is_narrow = exponent(low, r) >= -narrow && exponent(r_m, r) <= narrow;
        return alpha;
    }

    // P̄ of a row before its rounding, from S at fragment j, entries e = 0 and 1.
    template <bool is_narrow>
    __forceinline__ float2 probabilities(const float (&s)[M][N][4], int r, int j, int k0) const {
        const At here = at_key(r, k0 + column(j, 0)), next = at_key(r, k0 + column(j, 1));
        const float x = rnd<attn_x>(exponent(s[r / 2][j][r % 2 * 2], r), here);
        const float y = rnd<attn_x>(exponent(s[r / 2][j][r % 2 * 2 + 1], r), next);
        if constexpr (is_narrow) return {exponential_narrow(x), exponential_narrow(y)};
        else return {exponential<m_is_maximum>(x), exponential<m_is_maximum>(y)};
    }

    __forceinline__ void put(Weights<product_pv, M, N>& w, int r, int j, float2 x, int k0) const {
        const At here = at_key(r, k0 + column(j, 0)), next = at_key(r, k0 + column(j, 1));
        if constexpr (product_pv::half) {
            w.x[r / 2][j][r % 2] = rnd_pack<attn_p, product_pv::operand>(x.x, x.y, here);
        } else {
            w.x[r / 2][j][r % 2 * 2] = __float_as_uint(rnd<attn_p>(x.x, here));
            w.x[r / 2][j][r % 2 * 2 + 1] = __float_as_uint(rnd<attn_p>(x.y, next));
        }
    }

    // P̄ of fragments j0 to j1 at its site; adds this thread's columns of each row to its sum in ascending order.
    // Under `fa2` the first of a tile scales the sum by alpha, in one rounding; 1 is no scaling.
    template <bool is_narrow>
    __forceinline__ void weigh(Weights<product_pv, M, N>& w, const float (&s)[M][N][4], int k0,
                               const float (&alpha)[R], float (&sum)[R], int j0 = 0, int j1 = N) const {
#pragma unroll
        for (int j = j0; j < j1; j++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float2 x = probabilities<is_narrow>(s, r, j, k0);
                put(w, r, j, x, k0);
                const int e = r % 2 * 2;
                const float first = l_from_rounded ? w.value(r / 2, j, e) : x.x;
                sum[r] = order_fa2 && j == 0 ? __fmaf_rn(sum[r], alpha[r], first) : sum[r] + first;
                sum[r] += l_from_rounded ? w.value(r / 2, j, e + 1) : x.y;
            }
    }

    // l after the tile: `sum` is this thread's of the tile under `eager`.
    __forceinline__ void add_row_sum(int r, float sum) {
        const At here = at(row(r));
        if constexpr (order_fa2) l[r] = sum;
        else l[r] = rnd<attn_l>(l[r] + rnd<attn_l_tile>(quad_sum(sum), here), here);
    }

    __forceinline__ At place(int i, int j, int e, int first) const {
        return at(row(2 * i + e / 2), first + column(j, e % 2));
    }

    // O, scaled by alpha, and the tile's product. A −0, which a tensor core never gives, becomes +0.
    __forceinline__ float joined(float o, float alpha, float pv, const At& here) const {
        if constexpr (order_fa2 && attn_o_acc::is_fp32 && !product_pv::sequential && !tapped) return pv;
        else if constexpr (order_fa2) return rnd<attn_o_acc>(pv, here) + 0.f;
        else return rnd<attn_o_acc>(rnd<attn_o_scaled>(alpha * o, here) + rnd<attn_pv>(pv, here), here) + 0.f;
    }

    // f(o, i, j, e, place) for each element of O.
    template <class F>
    __forceinline__ void each_output(int first, F f) {
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < C; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) f(o[i][j][e], i, j, e, place(i, j, e, first));
    }

    // What the tile's product starts from.
    __forceinline__ float start(float o, float alpha, const At& here) const {
        return order_fa2 ? rnd<attn_o_scaled>(alpha * o, here) : 0.f;
    }

    // Adds a tile's P̄V to O, a few columns at a time.
    __forceinline__ void add_values(const Weights<product_pv, M, N>& w, unsigned v_shared, const float (&alpha)[R],
                                    int first) {
        constexpr int B = WARPGROUP ? 8 : product_pv::sequential && C <= 16 ? C : C % 4 == 0 ? 4 : 2;
#pragma unroll
        for (int j0 = 0; j0 < C; j0 += B) {
            float pv[M][B][4];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int j = 0; j < B; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        pv[i][j][e] = start(o[i][j0 + j][e], alpha[2 * i + e / 2], place(i, j0 + j, e, first));
            product_columns<product_pv, VTile>(pv, w, v_shared, j0 * 8);
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int j = 0; j < B; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        o[i][j0 + j][e] = joined(o[i][j0 + j][e], alpha[2 * i + e / 2], pv[i][j][e],
                                                 place(i, j0 + j, e, first));
        }
    }

    // O and L of finished rows.
    __forceinline__ void finish(int b, int head, int first) {
        at.tile = 0;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int q = row(r);
            const At here = at(q);
            if constexpr (order_fa2 && !algorithm_plain) l[r] = rnd<attn_l>(quad_sum(l[r]), here);
            if (q >= shape.tq) continue;
            const bool empty = l[r] == 0 && raw_maximum(r) == -INF;
            const float inverse = 1.f / l[r];
            const long long offset = (b * p.heads + head) * p.tq + q;
            if (first == 0 && threadIdx.x % 4 == 0) {
                const float log_l = logarithm(l[r] == 0 ? __int_as_float(0x7FFFFFFF) : l[r]);
                p.lse[offset] = rnd<attn_lse>(
                    empty ? -INF : order_fa2 ? __fmaf_rn(m[r], p.scale, log_l) : m[r] + log_l, here);
                if (p.m) p.m[offset] = m[r];
                if (p.l) p.l[offset] = l[r];
            }
            OUT* out = p.o.rows(b, head) + q * p.o.row;
            float* unrounded = p.o_unrounded.data ? p.o_unrounded.rows(b, head) + q * p.o_unrounded.row
                                                  : nullptr;
#pragma unroll
            for (int j = 0; j < C; j++) {
                float x[2], y[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float acc = o[r / 2][j][r % 2 * 2 + e];
                    x[e] = empty ? 0.f : algorithm_plain ? acc : order_fa2 ? acc * inverse : acc / l[r];
                    y[e] = rnd<attn_o>(x[e], at(q, first + column(j, e)));
                }
                const int d = first + column(j, 0);
                store_pair<HEAD_DIM>(out, d, y[0], y[1], p.aligned);
                if (unrounded) store_pair<HEAD_DIM>(unrounded, d, x[0], x[1], true);
            }
        }
        if (counts_ties && p.stats && first == 0) add_stats();
    }

    // Counts the flagged rows. The four threads of a row have the same flags.
    __forceinline__ void add_stats() const {
        const unsigned flags[3] = {tied, changed, limited};
#pragma unroll
        for (int i = 0; i < 3; i++) {
            int n = 0;
#pragma unroll
            for (int r = 0; r < R; r++)
                n += __popc(__ballot_sync(0xFFFFFFFFu, threadIdx.x % 4 == 0 && row(r) < shape.tq &&
                                                           (flags[i] >> r & 1)));
            if (n && threadIdx.x % 32 == 0) atomicAdd(p.stats + i, n);
        }
    }
};

// K and V of a block's head.
struct Heads {
    const Array<const IN>&k_array, &v_array;
    const IN *k, *v;  // v at the block's first column
    At at;            // of the head; tile 0
    int first;        // the first column of O

    __forceinline__ void load_keys(unsigned to, int k0, int k1) const {
        load_rows<product_s, attn_k, KEYS, COLUMNS, THREADS, DIRECT>(to, k + k0 * k_array.row, k_array.row,
                                                                     k1 - k0, HEAD_DIM, at(k0));
    }

    __forceinline__ void load_values(unsigned to, int k0, int k1) const {
        load_rows<product_pv, attn_v, KEYS, V_COLUMNS, THREADS, DIRECT>(to, v + k0 * v_array.row, v_array.row,
                                                                        k1 - k0, HEAD_DIM - first, at(k0, first));
    }
};

// Makes what this thread brought to shared memory visible to all.
inline void publish() {
#if WARPGROUP
    fence_shared_for_wgmma();
#endif
    __syncthreads();
}

#include "attention_forward_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_forward(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Shape shape{static_cast<int>(p.tq), static_cast<int>(p.tk), p.causal != 0};

    // Blocks of a head follow each other, the longest first: they share K and V in the L2 cache.
    const unsigned tiles = (shape.tq + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int first = blockIdx.x % SPLIT * V_COLUMNS;
    const int q0 = (tiles - 1 - blockIdx.x / SPLIT % tiles) * BLOCK_ROWS;
    const unsigned slice = blockIdx.x / SPLIT / tiles, head_count = p.head_count;
    const int b = slice / head_count, head = p.first_head + slice % head_count;
    const int kv_head = head / static_cast<int>(p.group);
    const int q1 = min(q0 + BLOCK_ROWS, shape.tq), row0 = q0 + threadIdx.x / 32 * ROWS;
    const At at{make_uint2(p.seed, p.seed >> 32), static_cast<unsigned>(p.step), static_cast<unsigned>(p.layer),
                static_cast<unsigned>(p.sample + b), static_cast<unsigned>(head), 0, 0, 0};
    auto key_end = [&](int row) { return shape.key_end(shape.query_tile_end(row, tile_forward_br), bc); };

    const unsigned q_shared = shared_address(shared);
    load_rows<product_s, attn_q, BLOCK_ROWS, COLUMNS, THREADS, DIRECT>(
        q_shared, p.q.rows(b, head) + q0 * p.q.row, p.q.row, q1 - q0, HEAD_DIM, at(q0));
    const Heads heads{p.k, p.v, p.k.rows(b, kv_head), p.v.rows(b, kv_head) + first, at, first};
    // The first row of what multiplies together.
    const int leader = WARPGROUP ? row0 - threadIdx.x / 32 % 4 * ROWS : row0;
    Rows rows{p, shape, at, row0, leader < shape.tq ? key_end(leader) : 0, q_shared + (leader - q0) * QTile::row};
    rows.clear();
    const unsigned tiles_shared = q_shared + QTile::bytes;
    if constexpr (one_chunk) short_tiles(rows, heads, tiles_shared, key_end(q1 - 1));
    else long_tiles<order_fa2 || algorithm_plain>(rows, heads, tiles_shared, q1, key_end(q1 - 1), first);
    rows.finish(b, head, first);
}
