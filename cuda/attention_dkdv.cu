// dK and dV of attention, and dS for dQ, with 16-bit operands of one format.
//
//     Sᵀ = K·Qᵀ   Pᵀ = exp(Sᵀ − L)   dV += Pᵀ·dO   dPᵀ = V·dOᵀ   dSᵀ = Pᵀ∘(dPᵀ − δ)   dK += dSᵀ·Q
//
// A block has a tile of keys and goes through the query tiles that visit it, 64 rows at a time. A warp has 16
// keys. The products are transposed so that Pᵀ and dSᵀ are operands as they lie in registers (FlashAttention-2's
// algorithm 2, the loops exchanged). dS goes to a scratch from which attention_dq.cu makes dQ: 16 × 16 blocks,
// each the 32 lanes' fragments in a row, (slot, key / 16, query / 16).
//
// Compiled with HEAD_DIM (a multiple of 16), DK and DV, the types of the results.

#include "attention_backward.cuh"
#include "attention_products.cuh"

constexpr Operand F = product_s::operand;
constexpr int kPanels = HEAD_DIM <= 64 ? 1 : HEAD_DIM <= 128 ? 2 : 4;
constexpr int kShare = HEAD_DIM > 128 ? 2 : 1;  // warps that have the same keys, each with its part of dK and dV
constexpr int kMine = kPanels / kShare;         // panels of dK and dV of a warp
constexpr int kThreads = 256, kKeys = kThreads / 2 / kShare, kRows = 64;
// wgmma gives 64 keys at once, so these must lie in one numeric tile.
constexpr bool wg = has_wgmma && tile_dkdv_bc % 64 == 0;

using KeyTile = Tile<kKeys>;
using RowTile = Tile<kRows>;
constexpr int kKeyBytes = kKeys * 128 * kPanels, kRowBytes = kRows * 128 * kPanels;

// Where the block is in its rows: numeric tiles of query rows in the order of the sum, 64 rows at a time.
struct Walk {
    int low, high, br;  // rows to visit; length of a numeric tile
    int tile, row;      // first row of the tile and of the 64

    Walk(int low_, int high_, int br_) : low(low_), high(high_), br(br_) {
        tile = order_fa2 && high > low ? low + (high - low - 1) / br * br : low;
        row = tile;
    }
    bool more() const { return low <= tile && tile < high; }
    int end() const { return high - tile < br ? high : tile + br; }  // of the tile
    bool last() const { return row + kRows >= end(); }
    void next() {
        row += kRows;
        if (row >= end()) {
            tile += order_fa2 ? -br : br;
            row = tile;
        }
    }
};

// P and dS of this thread's 2 keys × 16 rows, packed as operands; s and dp are overwritten.
template <bool Masked>
inline void elements(float (&s)[32], float (&dp)[32], unsigned (&p_out)[4][4], unsigned (&ds_out)[4][4], const Row* rows,
                     const float* inv_l, int row0, int end, int key0, const Args& args, const At& at) {
    const Shape shape = args.shape();
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float4 two = *reinterpret_cast<const float4*>(rows + 8 * j + 2 * t);
        const Row row[2] = {{two.x, two.y}, {two.z, two.w}};
        float p[4], ds[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int query = row0 + 8 * j + 2 * t + e % 2, key = key0 + g + e / 2 * 8;
            const At here = at(query, key);
            const float x = probability(s[4 * j + e], row[e % 2].base, p_bwd_from_m_l ? inv_l[8 * j + 2 * t + e % 2] : 0.f, args, here);
            p[e] = rnd<attn_p_bwd>(x, here);
            ds[e] = score_gradient(x, dp[4 * j + e], row[e % 2].delta, args, here);
            if (Masked && !(query < end && shape.visible(query, key) && !is_empty(row[e % 2].base))) p[e] = ds[e] = 0.f;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            p_out[j / 2][j % 2 * 2 + half] = pack<F>(p[2 * half], p[2 * half + 1]);
            ds_out[j / 2][j % 2 * 2 + half] = pack<F>(ds[2 * half], ds[2 * half + 1]);
        }
    }
}

// Calls f(key, column, element) for this thread's elements of dK or dV that exist.
template <class Call>
inline void each(float (&x)[kMine][32], int key0, int first_panel, const Args& args, Call f) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int panel = 0; panel < kMine; panel++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int key = key0 + g + i % 4 / 2 * 8, col = (first_panel + panel) * 64 + i / 4 * 8 + 2 * t + i % 2;
            if (key < args.tk && col < args.d) f(key, col, x[panel][i]);
        }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_dkdv(const Args args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const KeyTile k{shared_address(shared)}, v{k.address + kKeyBytes};
    const unsigned stages = v.address + kKeyBytes;
    const auto q_stage = [&](int i) { return RowTile{stages + 2 * i * kRowBytes}; };
    const auto do_stage = [&](int i) { return RowTile{stages + (2 * i + 1) * kRowBytes}; };
    Row* const rows = reinterpret_cast<Row*>(shared + 2 * kKeyBytes + 4 * kRowBytes);  // two stages of 64
    float* const inv_l = reinterpret_cast<float*>(rows + 2 * kRows);

    const int key_tiles = (args.tk + kKeys - 1) / kKeys;
    const Place place(args, blockIdx.x / key_tiles);
    const int block_key = blockIdx.x % key_tiles * kKeys;
    const int warp = threadIdx.x / 32, local_key = warp % (kKeys / 16) * 16, key0 = block_key + local_key;
    const int first_panel = warp / (kKeys / 16) * kMine;
    const Shape shape = args.shape();
    At at = place.at(args);

    // Numeric query tiles that visit the block's first key and this warp's: the warp's are among the block's.
    const int br = tile_length(tile_dkdv_br, args.tq), bc = tile_length(tile_dkdv_bc, args.tk);
    const int unit = wg ? key0 / 64 * 64 : key0, unit_end = unit + (wg ? 64 : 16);
    const int first = wg || unit < args.tk ? shape.first_row(unit / bc * bc, br) : args.tq;
    Walk now(max(shape.first_row(block_key / bc * bc, br), args.row0), args.row1, br), ahead = now;

    const unsigned short* q_rows = place.rows_of<unsigned short>(args.q, false);
    const unsigned short* do_rows = place.rows_of<unsigned short>(args.dout, false);
    const long long padded = place.pair * args.padded_rows;
    const auto load = [&](int stage) {
        if (ahead.more()) {
            q_stage(stage).load<kPanels, kThreads>(q_rows, args.q.row, ahead.row, ahead.end(), args.d);
            do_stage(stage).load<kPanels, kThreads>(do_rows, args.dout.row, ahead.row, ahead.end(), args.d);
            if (threadIdx.x < kRows / 2)
                copy16_async(shared_address(rows + stage * kRows + 2 * threadIdx.x), args.rows + padded + ahead.row + 2 * threadIdx.x);
            else if (p_bwd_from_m_l && threadIdx.x < kRows / 2 + kRows / 4) {
                const int i = 4 * (threadIdx.x - kRows / 2);
                copy16_async(shared_address(inv_l + stage * kRows + i), args.inv_l + padded + ahead.row + i);
            }
            ahead.next();
        }
        copy_commit();
    };
    k.load<kPanels, kThreads>(place.rows_of<unsigned short>(args.k, !args.k_per_head), args.k.row, block_key, args.tk, args.d);
    v.load<kPanels, kThreads>(place.rows_of<unsigned short>(args.v, !args.v_per_head), args.v.row, block_key, args.tk, args.d);
    load(0);

    float dv[kMine][32], dk[kMine][32];
    const long long head = (long long)place.pair * args.tk * args.d;
    const auto in_memory = [&](float* sums, int key, int col) -> float& { return sums[head + key * (long long)args.d + col]; };
#pragma unroll
    for (int panel = 0; panel < kMine; panel++) clear(dv[panel]), clear(dk[panel]);
    if (order_fa2 && !args.begins) {
        each(dv, key0, first_panel, args, [&](int key, int col, float& x) { x = in_memory(args.dv_head, key, col); });
        each(dk, key0, first_panel, args, [&](int key, int col, float& x) { x = in_memory(args.dk_head, key, col); });
    }
    bool begun = !args.begins;  // whether memory has a running sum (`eager` keeps it there)

    const int row_blocks = (args.row1 - args.row0 + 15) / 16, key_blocks = (args.tk + 15) / 16;
    uint4* const ds_blocks = static_cast<uint4*>(args.ds) + ((long long)place.slot * key_blocks + key0 / 16) * row_blocks * 32 + threadIdx.x % 32;

    for (int stage = 0; now.more(); stage ^= 1) {
        copy_wait<0>();
        publish_tiles<wg>();
        __syncthreads();
        load(stage ^ 1);
        if (now.tile >= first) {
            float s[32], dp[32];
            begin_products<wg>();
            multiply_rows<F, wg, HEAD_DIM>(s, k, local_key, q_stage(stage));
            commit_products<wg>();
            multiply_rows<F, wg, HEAD_DIM>(dp, v, local_key, do_stage(stage));
            commit_products<wg>();
            wait_products<wg, 1>(s);
            wait_products<wg, 0>(dp);

            const Row* stage_rows = rows + stage * kRows;
            const int lane = threadIdx.x % 32;
            const bool empty = __any_sync(~0u, is_empty(stage_rows[lane].base) || is_empty(stage_rows[lane + 32].base));
            unsigned p[4][4], ds[4][4];
            if (empty || now.row + kRows > now.end() || !shape.all_visible(now.row, unit_end))
                elements<true>(s, dp, p, ds, stage_rows, inv_l + stage * kRows, now.row, now.end(), key0, args, at);
            else
                elements<false>(s, dp, p, ds, stage_rows, inv_l + stage * kRows, now.row, now.end(), key0, args, at);

            begin_products<wg>();
            multiply_columns<F, wg, kMine>(dv, p, do_stage(stage), first_panel);
            multiply_columns<F, wg, kMine>(dk, ds, q_stage(stage), first_panel);
            commit_products<wg>();
            if (first_panel == 0 && key0 < args.tk)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (now.row + 16 * i < now.end())
                        ds_blocks[((now.row - args.row0) / 16 + i) * 32] = make_uint4(ds[i][0], ds[i][1], ds[i][2], ds[i][3]);
#pragma unroll
            for (int panel = 0; panel < kMine; panel++) wait_products<wg, 0>(dv[panel]), wait_products<wg, 0>(dk[panel]);

            if (now.last()) {
                at.tile = now.tile / br;
                if constexpr (order_fa2) {
                    each(dv, key0, first_panel, args, [&](int key, int col, float& x) { x = rnd<attn_dv_acc>(x, at(key, col)); });
                    each(dk, key0, first_panel, args, [&](int key, int col, float& x) { x = rnd<attn_dk_acc>(x, at(key, col)); });
                } else {
                    each(dv, key0, first_panel, args, [&](int key, int col, float& x) {
                        float& sum = in_memory(args.dv_head, key, col);
                        sum = rnd<attn_dv_acc>((begun ? sum : 0.f) + rnd<attn_dv_tile>(x, at(key, col)), at(key, col));
                        x = 0.f;
                    });
                    each(dk, key0, first_panel, args, [&](int key, int col, float& x) {
                        float& sum = in_memory(args.dk_head, key, col);
                        sum = rnd<attn_dk_acc>((begun ? sum : 0.f) + rnd<attn_dk_tile>(x, at(key, col)), at(key, col));
                        x = 0.f;
                    });
                    begun = true;
                }
            }
        }
        now.next();
    }
    copy_wait<0>();

    at.tile = 0;
    if (!order_fa2 && begun) {
        each(dv, key0, first_panel, args, [&](int key, int col, float& x) { x = in_memory(args.dv_head, key, col); });
        each(dk, key0, first_panel, args, [&](int key, int col, float& x) { x = in_memory(args.dk_head, key, col); });
    }
    if (args.ends && args.group == 1) {
        DV* const dv_out = static_cast<DV*>(args.dv.data) + place.sample * args.dv.batch + place.head * args.dv.head;
        DK* const dk_out = static_cast<DK*>(args.dk.data) + place.sample * args.dk.batch + place.head * args.dk.head;
        each(dv, key0, first_panel, args, [&](int key, int col, float& x) {
            const At here = at(key, col);
            store(dv_out + key * args.dv.row + col, rnd<attn_dv>(finished<attn_dv_head>(x, false, args, here), here));
        });
        each(dk, key0, first_panel, args, [&](int key, int col, float& x) {
            const At here = at(key, col);
            store(dk_out + key * args.dk.row + col, rnd<attn_dk>(finished<attn_dk_head>(x, true, args, here), here));
        });
    } else {
        each(dv, key0, first_panel, args, [&](int key, int col, float& x) {
            in_memory(args.dv_head, key, col) = args.ends ? finished<attn_dv_head>(x, false, args, at(key, col)) : x;
        });
        each(dk, key0, first_panel, args, [&](int key, int col, float& x) {
            in_memory(args.dk_head, key, col) = args.ends ? finished<attn_dk_head>(x, true, args, at(key, col)) : x;
        });
    }
}
