// dK and dV of attention, and dS for dQ, with 16-bit operands of one format.
//
//     Sᵀ = K·Qᵀ   Pᵀ = exp(Sᵀ − L)   dV += Pᵀ·dO   dPᵀ = V·dOᵀ   dSᵀ = Pᵀ∘(dPᵀ − δ)   dK += dSᵀ·Q
//
// A block has 64 keys and goes through the query tiles that visit them, 64 rows at a time (FlashAttention-2's
// algorithm 2, the loops exchanged). A warp has 16 keys. The products are transposed so that Pᵀ and dSᵀ are
// operands as they lie in registers. dS goes to a scratch from which attention_dq.cu makes dQ: 16 × 16
// blocks, each the 32 lanes' fragments in a row, by (slot, key / 16, query / 16).
//
// Sums under `fa2` are made in registers. Under `eager` a tile's product is, and the sum of tiles lies in
// shared memory. Sums that launches over other rows go on from pass through args.dk_head and dv_head.
//
// Macros: HEAD_DIM, a multiple of 16; STAGES, of Q and dO in shared memory; BLOCKS, at least, of an SM;
// DK and DV, the types of the results.

#include "attention_backward.cuh"
#include "attention_products.cuh"

constexpr Operand F = product_s::operand;
constexpr int kPanels = HEAD_DIM <= 64 ? 1 : HEAD_DIM <= 128 ? 2 : 4;
constexpr int kShare = HEAD_DIM > 128 ? 2 : 1;  // warps of the same keys, each with its part of dK and dV
constexpr int kMine = kPanels / kShare;  // panels of dK and dV of a warp
constexpr int kThreads = 128 * kShare, kKeys = 64, kRows = 64;
// wgmma gives 64 keys at once, so these must lie in one numeric tile.
constexpr bool wg = has_wgmma && tile_dkdv_bc % 64 == 0;

using Rows64 = Tile<64>;
constexpr int kTileBytes = 64 * 128 * kPanels;

// Where the block is in its rows, from `low` on: numeric tiles of query rows in the order of the sum, 64 rows
// at a time.
struct Walk {
    int tile, row;  // first row of the tile and of the 64

    static int length(const Args& args) { return tile_length(tile_dkdv_br, args.tq); }
    Walk(int low, const Args& args) {
        tile = order_fa2 && args.row1 > low ? low + (args.row1 - low - 1) / length(args) * length(args) : low;
        row = tile;
    }
    bool more(int low, const Args& args) const {
        return order_fa2 ? tile >= low && tile < args.row1 : tile < args.row1;
    }
    int end(const Args& args) const {
        return args.row1 - tile < length(args) ? args.row1 : tile + length(args);
    }  // of the tile
    bool last(const Args& args) const { return row + kRows >= end(args); }
    void next(const Args& args) {
        row += kRows;
        if (row >= end(args)) {
            tile += order_fa2 ? -length(args) : length(args);
            row = tile;
        }
    }
};

// What a warp needs of its elements in 64 rows. Element x[4j + e] is key key0 + g + 8·(e / 2), row
// row0 + 8j + 2t + e % 2.
struct Elements {
    const Args& args;
    const At& at;
    const Row* rows;  // of this thread: rows 2t, 2t + 1 of each 8
    const float* inv_l;
    int query0, key0;  // this thread's first
    int end;           // of the rows' tile

    Elements(const Args& args_, const At& at_, const Row* rows_, const float* inv_l_, int row0, int end_, int warp_key)
        : args(args_), at(at_), end(end_) {
        const int t = threadIdx.x % 4;
        rows = rows_ + 2 * t, inv_l = inv_l_ + 2 * t, query0 = row0 + 2 * t,
        key0 = warp_key + threadIdx.x % 32 / 4;
    }
    int key(int e) const { return key0 + e / 2 * 8; }
    int query(int j, int e) const { return query0 + 8 * j + e % 2; }
    // Taps have no place for rows from `end` on, which the next tile has shown under `fa2`.
    At place(int j, int e) const { return at(tapped && query(j, e) >= end ? not_there : query(j, e), key(e)); }
    float4 two_rows(int j) const { return *reinterpret_cast<const float4*>(rows + 8 * j); }

    // A bit for each element that is masked, in an empty row or, from row `end` on, in none of the tile.
    unsigned hidden() const {
        unsigned bits = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            // Rows that see the key: from `low` on.
            const int low = args.causal ? max(key(e) - (args.tk - args.tq), 0) : 0;
            const unsigned count = key(e) < args.tk ? max(end - low, 0) : 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float base = rows[8 * j + e % 2].base;
                bits |= unsigned((unsigned(query(j, e) - low) >= count) | is_empty(base)) << (4 * j + e);
            }
        }
        return bits;
    }

    // The argument of exp from S, in place; the largest magnitude is returned, or NaN.
    template <bool Masked>
    float exponents(float (&s)[32], unsigned hidden) const {
        float most = 0.f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float4 two = two_rows(j);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[4 * j + e];
                x = exponent(x, e % 2 ? two.z : two.x, args, place(j, e));
                if (Masked && hidden >> (4 * j + e) & 1) x = 0.f;  // whatever, but narrow
                most = functions::max_nan(most, fabsf(x));
            }
        }
        return most;
    }

    // P from the argument of exp, in place. Narrow: all are finite and P is normal.
    template <bool Narrow>
    void probabilities(float (&s)[32]) const {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            // A branch for each, as few elements need more: together they would need more registers.
            if (Narrow || fabsf(s[i]) <= narrow)
                s[i] = exponential_narrow(s[i]);
            else
                s[i] = exponential(s[i]);
            if (p_bwd_from_m_l) s[i] *= inv_l[i / 4 * 8 + i % 2];
        }
    }

    // P and dS from P and dP, packed as operands.
    template <bool Masked>
    void gradients(const float (&p)[32], const float (&dp)[32], unsigned hidden, unsigned (&p_out)[4][4],
                   unsigned (&ds_out)[4][4]) const {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float4 two = two_rows(j);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float p_two[2], ds_two[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int i = 2 * h + e;
                    p_two[e] = p[4 * j + i];
                    ds_two[e] = score_gradient(p_two[e], dp[4 * j + i], e ? two.w : two.y, args,
                                               place(j, i));
                    if (Masked && hidden >> (4 * j + i) & 1) p_two[e] = ds_two[e] = 0.f;
                }
                const At here = place(j, 2 * h), next = place(j, 2 * h + 1);
                p_out[j / 2][j % 2 * 2 + h] = rnd_two<attn_p_bwd, F>(p_two[0], p_two[1], here, next);
                ds_out[j / 2][j % 2 * 2 + h] = rnd_two<attn_ds, F>(ds_two[0], ds_two[1], here, next);
            }
        }
    }
};

// A thread's sums of dK or dV in shared memory, in pairs: packed where the format of their site has 16 bits.
template <class Site>
struct SharedSums {
    static constexpr bool bf16_pairs = Site::template same_format<8, 7, false>,
                          fp16_pairs = Site::template same_format<5, 10, false>;
    static constexpr int bytes = order_fa2 ? 0 : kMine * 16 * kThreads * (bf16_pairs || fp16_pairs ? 4 : 8);
    unsigned char* data;

    float2 get(int pair) const {
        if constexpr (bf16_pairs)
            return unpack<Operand::bf16>(word(pair));
        else if constexpr (fp16_pairs)
            return unpack<Operand::fp16>(word(pair));
        else
            return reinterpret_cast<const float2*>(data)[pair * kThreads + threadIdx.x];
    }
    void set(int pair, float x, float y) const {
        if constexpr (bf16_pairs)
            word(pair) = pack<Operand::bf16>(x, y);
        else if constexpr (fp16_pairs)
            word(pair) = pack<Operand::fp16>(x, y);
        else
            reinterpret_cast<float2*>(data)[pair * kThreads + threadIdx.x] = make_float2(x, y);
    }
    unsigned& word(int pair) const {
        return reinterpret_cast<unsigned*>(data)[pair * kThreads + threadIdx.x];
    }
};

// Where a thread's elements of dK and dV belong: x[panel][i].
struct Outputs {
    int key0, column0;

    Outputs(int key0_, int first_panel)
        : key0(key0_ + threadIdx.x % 32 / 4), column0(first_panel * 64 + 2 * (threadIdx.x % 4)) {}
    int key(int i) const { return key0 + i % 4 / 2 * 8; }
    int column(int panel, int i) const { return column0 + panel * 64 + i / 4 * 8 + i % 2; }

    // Calls f(key, column, two neighbours) for those that exist, the second maybe not.
    template <class Call>
    void each(float (&x)[kMine][32], const Args& args, Call f) const {
#pragma unroll
        for (int h = 0; h < 4; h += 2)
            if (key(h) < args.tk)
#pragma unroll
                for (int panel = 0; panel < kMine; panel++)
#pragma unroll
                    for (int i = h; i < 32; i += 4)
                        if (column(panel, i) < args.d)
                            f(key(i), column(panel, i), x[panel][i], x[panel][i + 1]);
    }

    // A numeric tile is done: x is its product under `eager`, the sum so far under `fa2`.
    template <class TileSite, class Site>
    void end_tile(float (&x)[kMine][32], const SharedSums<Site>& sums, const At& at) const {
#pragma unroll
        for (int panel = 0; panel < kMine; panel++)
#pragma unroll
            for (int i = 0; i < 32; i += 2) {
                const At here[2] = {at(key(i), column(panel, i)), at(key(i), column(panel, i + 1))};
                if constexpr (order_fa2) {
#pragma unroll
                    for (int e = 0; e < 2; e++) x[panel][i + e] = rnd<Site>(x[panel][i + e], here[e]);
                } else {
                    const int pair = panel * 16 + i / 2;
                    const float2 sum = sums.get(pair);
                    sums.set(pair, rnd<Site>(sum.x + rnd<TileSite>(x[panel][i], here[0]), here[0]),
                             rnd<Site>(sum.y + rnd<TileSite>(x[panel][i + 1], here[1]), here[1]));
                    x[panel][i] = x[panel][i + 1] = 0.f;
                }
            }
    }

    template <class Site>
    void begin(float (&x)[kMine][32], const SharedSums<Site>& sums, const float* from,
               const Args& args) const {
#pragma unroll
        for (int panel = 0; panel < kMine; panel++) clear(x[panel]);
        if (!args.begins)
            each(x, args, [&](int key, int col, float& y, float& z) {
                const float* at = from + key * (long long)args.d + col;
                y = at[0], z = col + 1 < args.d ? at[1] : 0.f;
            });
        if constexpr (!order_fa2)
#pragma unroll
            for (int panel = 0; panel < kMine; panel++) {
#pragma unroll
                for (int i = 0; i < 32; i += 2) sums.set(panel * 16 + i / 2, x[panel][i], x[panel][i + 1]);
                clear(x[panel]);
            }
    }

    // The gradient to memory, or, where launches or heads are missing, its sum or share.
    template <class HeadSite, class ResultSite, bool Scaled, class T, class Site>
    void finish(float (&x)[kMine][32], const SharedSums<Site>& sums, float* share, T* result,
                long long stride, const Args& args, const At& at) const {
        if constexpr (!order_fa2)
#pragma unroll
            for (int panel = 0; panel < kMine; panel++)
#pragma unroll
                for (int i = 0; i < 32; i += 2) {
                    const float2 sum = sums.get(panel * 16 + i / 2);
                    x[panel][i] = sum.x, x[panel][i + 1] = sum.y;
                }
        each(x, args, [&](int key, int col, float y, float z) {
            const At here[2] = {at(key, col), at(key, col + 1)};
            if (args.ends)
                y = finished<HeadSite>(y, Scaled, args, here[0]),
                z = finished<HeadSite>(z, Scaled, args, here[1]);
            if (args.ends && args.group == 1)
                store_pair(result + key * stride, col, rnd<ResultSite>(y, here[0]),
                           rnd<ResultSite>(z, here[1]), args);
            else
                store_pair(share + key * (long long)args.d, col, y, z, args);
        });
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) attention_dkdv(const Args args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Rows64 k{shared_address(shared)}, v{k.address + kTileBytes};
    const auto q_stage = [&](int i) { return Rows64{v.address + (1 + 2 * i) * kTileBytes}; };
    const auto do_stage = [&](int i) { return Rows64{v.address + (2 + 2 * i) * kTileBytes}; };
    unsigned char* const behind = shared + (2 + 2 * STAGES) * kTileBytes;
    Row* const rows = reinterpret_cast<Row*>(behind);
    float* const inv_l = reinterpret_cast<float*>(rows + STAGES * kRows);
    const SharedSums<attn_dv_acc> dv_sums{behind + STAGES * kRows * 12};
    const SharedSums<attn_dk_acc> dk_sums{dv_sums.data + dv_sums.bytes};

    const int key_tiles = (args.tk + kKeys - 1) / kKeys;
    const Turn turn(args, key_tiles);
    const Place place(args, turn.slot);
    const int block_key = turn.tile * kKeys;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that it is the warp's
    const int lane = threadIdx.x % 32, local_key = warp % 4 * 16, key0 = block_key + local_key;
    const int first_panel = kShare == 1 ? 0 : warp / 4 * kMine;
    const Shape shape = args.shape();
    At at = place.at(args);

    // Numeric query tiles that visit the block's first key and this warp's: the warp's are among the block's.
    const int br = Walk::length(args), bc = tile_length(tile_dkdv_bc, args.tk);
    const int unit = wg ? block_key : key0, unit_end = unit + (wg ? 64 : 16);
    const int low = max(shape.first_row(block_key / bc * bc, br), args.row0);
    const int first = unit < args.tk ? shape.first_row(unit / bc * bc, br) : args.tq;

    const auto load = [&](int stage, const Walk& to) {
        if (to.more(low, args)) {
            const int end = to.end(args);
            q_stage(stage).load<kPanels, kThreads>(place.rows_of<unsigned short>(args.q, false), args.q.row,
                                                   to.row, end, args.d);
            do_stage(stage).load<kPanels, kThreads>(place.rows_of<unsigned short>(args.dout, false),
                                                    args.dout.row, to.row, end, args.d);
            const long long from = place.pair * args.padded_rows + to.row;
            if (threadIdx.x < kRows / 2) {
                copy16_async(shared_address(rows + stage * kRows + 2 * threadIdx.x),
                             args.rows + from + 2 * threadIdx.x);
            } else if (p_bwd_from_m_l && threadIdx.x < kRows / 2 + kRows / 4) {
                const int i = 4 * (threadIdx.x - kRows / 2);
                copy16_async(shared_address(inv_l + stage * kRows + i), args.inv_l + from + i);
            }
        }
        copy_commit();
    };
    Walk now(low, args);
    k.load<kPanels, kThreads>(place.rows_of<unsigned short>(args.k, !args.k_per_head), args.k.row, block_key,
                              args.tk, args.d);
    v.load<kPanels, kThreads>(place.rows_of<unsigned short>(args.v, !args.v_per_head), args.v.row, block_key,
                              args.tk, args.d);
    load(0, now);

    const Outputs outputs(key0, first_panel);
    const long long head = args.sums_of(place.pair);
    float dv[kMine][32], dk[kMine][32];
    outputs.begin(dv, dv_sums, args.dv_head + head, args);
    outputs.begin(dk, dk_sums, args.dk_head + head, args);

    const int row_blocks = (args.row1 - args.row0 + 15) / 16, key_blocks = (args.tk + 15) / 16;

    for (int stage = 0; now.more(low, args); stage = (stage + 1) % STAGES) {
        copy_wait<0>();
        publish_tiles<wg>();
        __syncthreads();
        if (STAGES > 1) {
            Walk then = now;
            then.next(args);
            load((stage + 1) % STAGES, then);
        }
        if (wg || now.tile >= first) {  // with wgmma all warps' keys lie in the block's numeric tile
            const Rows64 q_tile = q_stage(stage), do_tile = do_stage(stage);
            float s[32], dp[32];
            begin_products<wg>();
            multiply_rows<F, wg, HEAD_DIM>(s, k, local_key, q_tile);
            commit_products<wg>();
            multiply_rows<F, wg, HEAD_DIM>(dp, v, local_key, do_tile);
            commit_products<wg>();

            const Row* const now_rows = rows + stage * kRows;
            const Elements elements(args, at, now_rows, inv_l + stage * kRows, now.row, now.end(args),
                                    key0);
            const bool empty =
                __any_sync(~0u, is_empty(now_rows[lane].base) || is_empty(now_rows[lane + 32].base));
            const bool masked =
                empty || now.row + kRows > now.end(args) || !shape.all_visible(now.row, unit_end);

            const unsigned hidden = masked ? elements.hidden() : 0;
            wait_products<wg, 1>(s);
            const float most = masked ? elements.exponents<true>(s, hidden) : elements.exponents<false>(s, 0);
            if (__any_sync(~0u, !(most <= narrow)))
                elements.probabilities<false>(s);
            else
                elements.probabilities<true>(s);
            wait_products<wg, 0>(dp);
            unsigned p[4][4], ds[4][4];
            if (masked)
                elements.gradients<true>(s, dp, hidden, p, ds);
            else
                elements.gradients<false>(s, dp, 0, p, ds);

            begin_products<wg>();
            multiply_columns<F, wg, kMine>(dv, p, do_tile, first_panel);
            multiply_columns<F, wg, kMine>(dk, ds, q_tile, first_panel);
            commit_products<wg>();
            if (first_panel == 0 && key0 < args.tk) {
                const long long block = (long long)place.slot * key_blocks + key0 / 16;
                uint4* const to = static_cast<uint4*>(args.ds) +
                                  (block * row_blocks + (now.row - args.row0) / 16) * 32 + lane;
                const int blocks = (now.end(args) - now.row + 15) / 16;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (i < blocks) to[i * 32] = make_uint4(ds[i][0], ds[i][1], ds[i][2], ds[i][3]);
            }
#pragma unroll
            for (int panel = 0; panel < kMine; panel++)
                wait_products<wg, 0>(dv[panel]), wait_products<wg, 0>(dk[panel]);

            if (now.last(args)) {
                at.tile = now.tile / br;
                outputs.end_tile<attn_dv_tile>(dv, dv_sums, at);
                outputs.end_tile<attn_dk_tile>(dk, dk_sums, at);
            }
        }
        now.next(args);
        if (STAGES == 1) {
            __syncthreads();
            load(0, now);
        }
    }
    copy_wait<0>();

    at.tile = 0;
    DV* const dv_out =
        static_cast<DV*>(args.dv.data) + place.sample * args.dv.batch + place.head * args.dv.head;
    DK* const dk_out =
        static_cast<DK*>(args.dk.data) + place.sample * args.dk.batch + place.head * args.dk.head;
    outputs.finish<attn_dv_head, attn_dv, false>(dv, dv_sums, args.dv_head + head, dv_out, args.dv.row, args,
                                                 at);
    outputs.finish<attn_dk_head, attn_dk, true>(dk, dk_sums, args.dk_head + head, dk_out, args.dk.row, args,
                                                at);
}
