// dQ of attention from the dS that attention_dkdv.cu left: dQ = Σ dS·K over numeric key tiles, each product
// from zero, rounded and added in the order of the sum.
//
// A block has 64 query rows, a warp 16 of them; K comes 64 keys at a time.
//
// Macros: HEAD_DIM, a multiple of 16; STAGES, at least 2, of K and dS in shared memory; BLOCKS, at least, of
// an SM; DQ, the type of the result.

#include "attention_backward.cuh"
#include "attention_products.cuh"

constexpr Operand F = product_dq::operand;
constexpr int kPanels = HEAD_DIM <= 64 ? 1 : HEAD_DIM <= 128 ? 2 : 4;
constexpr int kShare = HEAD_DIM > 128 ? 2 : 1;  // warps that have the same rows, each with its part of dQ
constexpr int kMine = kPanels / kShare;
constexpr int kThreads = 128 * kShare, kRows = 64, kKeys = 64;
constexpr bool wg =
    has_wgmma && tile_dq_br % 64 == 0;  // wgmma takes 64 rows, which must lie in one numeric tile

using KeyTile = Tile<kKeys>;
constexpr int kKeyBytes = kKeys * 128 * kPanels, kStageBytes = kKeyBytes + kThreads * 64;

inline unsigned transposed(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Where the block is in its keys: numeric tiles in the order of the sum, 64 keys at a time.
struct Walk {
    int high, bc, tk;
    int tile, key;

    Walk(int high_, int bc_, int tk_) : high(high_), bc(bc_), tk(tk_) {
        tile = order_fa2 && high > 0 ? (high - 1) / bc * bc : 0;
        key = tile;
    }
    bool more() const { return 0 <= tile && tile < high; }
    int end() const { return tk - tile < bc ? tk : tile + bc; }
    bool last() const { return key + kKeys >= end(); }
    void next() {
        key += kKeys;
        if (key >= end()) {
            tile += order_fa2 ? -bc : bc;
            key = tile;
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) attention_dq(const Args args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const auto k_stage = [&](int i) { return KeyTile{shared_address(shared) + i * kStageBytes}; };
    const auto ds_stage = [&](int i) {
        return reinterpret_cast<uint4*>(shared + i * kStageBytes + kKeyBytes) + threadIdx.x;
    };

    const int row_tiles = (args.row1 - args.row0 + kRows - 1) / kRows;
    const Turn turn(args, row_tiles);
    const Place place(args, turn.slot);
    const int block_row = args.row0 + (row_tiles - 1 - turn.tile) * kRows;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int row0 = block_row + warp % 4 * 16, first_panel = kShare == 1 ? 0 : warp / 4 * kMine;
    const Shape shape = args.shape();
    At at = place.at(args);

    // End of the keys that a row's numeric tile visits.
    const auto end_of = [&](int row) {
        return row < args.row1 ? shape.key_end(shape.query_tile_end(row, tile_dq_br), tile_dq_bc) : 0;
    };
    const int my_end = end_of(wg ? block_row : row0);
    const int bc = tile_length(tile_dq_bc, args.tk);
    Walk now(max(end_of(block_row), end_of(min(block_row + kRows, args.row1) - 1)), bc, args.tk), ahead = now;

    const unsigned short* k_rows = place.rows_of<unsigned short>(args.k, !args.k_per_head);
    // dS of this warp's rows: blocks that no row sees were not written, and are 0. A thread reads its own copies.
    const int row_blocks = (args.row1 - args.row0 + 15) / 16, key_blocks = (args.tk + 15) / 16;
    const int last_row = min(row0 + 16, args.row1) - 1;
    const uint4* const ds_blocks =
        static_cast<const uint4*>(args.ds) +
        ((long long)place.slot * key_blocks * row_blocks + (row0 - args.row0) / 16) * 32 + lane;
    const int seen = row0 < args.row1 ? shape.last_key(last_row) + 1 : 0;  // keys that this warp's rows see
    const auto load = [&](int stage) {
        if (ahead.more()) {
            k_stage(stage).load<kPanels, kThreads>(k_rows, args.k.row, ahead.key, ahead.end(), args.d);
            const uint4* from = ds_blocks + (long long)(ahead.key / 16) * row_blocks * 32;
            const int end = min(ahead.end(), seen);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool there = ahead.key + 16 * i < end;
                copy16_async(shared_address(ds_stage(stage) + i * kThreads),
                             there ? from + (long long)i * row_blocks * 32 : args.ds, there);
            }
            ahead.next();
        }
        copy_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) load(i);

    float dq[kMine][32], tile[kMine][32];
#pragma unroll
    for (int panel = 0; panel < kMine; panel++) clear(dq[panel]), clear(tile[panel]);

    for (int stage = 0; now.more(); stage = (stage + 1) % STAGES) {
        copy_wait<STAGES - 2>();
        publish_tiles<wg>();
        __syncthreads();
        load((stage + STAGES - 1) % STAGES);
        if (now.tile < my_end) {
            unsigned ds[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // From key rows and query columns to query rows and key columns.
                const uint4 x = ds_stage(stage)[i * kThreads];
                ds[i][0] = transposed(x.x), ds[i][1] = transposed(x.z);
                ds[i][2] = transposed(x.y), ds[i][3] = transposed(x.w);
            }
            begin_products<wg>();
            multiply_columns<F, wg, kMine>(tile, ds, k_stage(stage), first_panel);
            commit_products<wg>();
#pragma unroll
            for (int panel = 0; panel < kMine; panel++) wait_products<wg, 0>(tile[panel]);
            if (now.last()) {
                at.tile = now.tile / bc;
                const int g = lane / 4, t = lane % 4;
#pragma unroll
                for (int panel = 0; panel < kMine; panel++)
#pragma unroll
                    for (int i = 0; i < 32; i++) {
                        const At here = at(row0 + g + i % 4 / 2 * 8,
                                           (first_panel + panel) * 64 + i / 4 * 8 + 2 * t + i % 2);
                        dq[panel][i] =
                            rnd<attn_dq_acc>(dq[panel][i] + rnd<attn_dq_tile>(tile[panel][i], here), here);
                        tile[panel][i] = 0.f;
                    }
            }
        }
        now.next();
    }
    copy_wait<0>();

    at.tile = 0;
    DQ* const out = static_cast<DQ*>(args.dq.data) + place.sample * args.dq.batch + place.head * args.dq.head;
    const int t = lane % 4;
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
        const int row = row0 + lane / 4 + h / 2 * 8;
        if (row < args.row1)
#pragma unroll
            for (int panel = 0; panel < kMine; panel++)
#pragma unroll
                for (int i = h; i < 32; i += 4) {
                    const int col = (first_panel + panel) * 64 + i / 4 * 8 + 2 * t;
                    if (col < args.d)
                        store_pair(out + row * args.dq.row, col,
                                   finished<attn_dq>(dq[panel][i], true, args, at(row, col)),
                                   finished<attn_dq>(dq[panel][i + 1], true, args, at(row, col + 1)), args);
                }
    }
}
