// Products of backward on 16-bit operands in shared memory: by wgmma where the numeric tiles allow it, else
// by mma.sync. Both leave the same bits in the same registers: warp w has rows 16w to 16w + 15, and element
// x[4j + e] is mma.cuh's fragment C at columns 8j to 8j + 7.
//
// A tile lies as panels of 64 columns; a panel is its rows of 128 bytes, the 16-byte chunks of row r permuted
// by r mod 8, as wgmma's 128-byte swizzle has it and as ldmatrix reads without bank conflicts.
#pragma once

#include "copy.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool has_wgmma = true;
#else
constexpr bool has_wgmma = false;
#endif

constexpr int panel_columns = 64, panel_row_bytes = 128;

// A tile of Rows × (64 · panels) 16-bit values at a shared address, a multiple of 1024.
template <int Rows>
struct Tile {
    unsigned address;

    static constexpr int panel_bytes = Rows * panel_row_bytes;

    unsigned chunk(int row, int column8) const {
        return address + column8 / 8 * panel_bytes + row * panel_row_bytes + ((column8 % 8 ^ row % 8) << 4);
    }

    // Begins to copy rows first to first + Rows of an array (T, d); those from `end` and columns from d on are 0.
    template <int Panels, int Threads>
    void load(const void* from, long long stride, int first, int end, int d) const {
        constexpr int across = Panels * 8, together = Threads / across;  // chunks of a row; rows at once
        static_assert(Threads % across == 0 && Rows % together == 0 && together % 4 == 0);
        const int row = threadIdx.x / across, column8 = threadIdx.x % across;
        const bool inside = column8 * 8 < d;
        const unsigned short* x = static_cast<const unsigned short*>(from);
        const unsigned to = chunk(row, column8);
        if (first + Rows <= end && Panels * 64 == d) {
            const unsigned short* source = x + (first + row) * stride + column8 * 8;
#pragma unroll
            for (int i = 0; i < Rows; i += together)
                copy16_async(to + i * panel_row_bytes, source + i * stride);
            return;
        }
        const unsigned short* source = x + (inside ? (first + row) * stride + column8 * 8 : 0);
#pragma unroll
        for (int i = 0; i < Rows; i += together) {
            const bool there = inside && first + row + i < end;
            copy16_async(chunk(row + i, column8), there ? source + i * stride : x, there);
        }
    }
};

inline void clear(float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = 0.f;
}

// x (16 × 64 a warp) = A · Bᵀ over `Depth` columns of both tiles: 16 rows of A from a_row on, 64 rows of B.
template <Operand F, bool Wgmma, int Depth, int RowsA>
inline void multiply_rows(float (&x)[32], Tile<RowsA> a, int a_row, Tile<64> b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Wgmma) {
        const unsigned first = a.address + a_row / 64 * 64 * panel_row_bytes;  // of the warpgroup
#pragma unroll
        for (int k = 0; k < Depth / 16; k++) {
            const auto da =
                matrix_descriptor(first + k / 4 * a.panel_bytes + k % 4 * 32, 16, 1024, Swizzle::b128);
            const auto db =
                matrix_descriptor(b.address + k / 4 * b.panel_bytes + k % 4 * 32, 16, 1024, Swizzle::b128);
            if (k == 0)
                wgmma<F, false, true>(x, da, db);
            else
                wgmma<F>(x, da, db);
        }
        return;
    }
#endif
    clear(x);
    const int lane = threadIdx.x % 32;
#pragma unroll(Depth > 64 ? 2 : Depth / 16)  // more would take registers for addresses
    for (int k = 0; k < Depth / 16; k++) {
        unsigned fa[4];
        load_matrices(fa, a.chunk(a_row + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned fb[4];
            load_matrices(fb, b.chunk(16 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma<F>(reinterpret_cast<float (&)[4]>(x[8 * j]), fa, {fb[0], fb[1]});
            mma<F>(reinterpret_cast<float (&)[4]>(x[8 * j + 4]), fa, {fb[2], fb[3]});
        }
    }
}

// x (16 × 64 · Panels a warp) += A · B: A (64 columns) from registers, B the tile, panels from first_panel.
template <Operand F, bool Wgmma, int Panels>
inline void multiply_columns(float (&x)[Panels][32], const unsigned (&a)[4][4], Tile<64> b, int first_panel) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Wgmma) {
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int panel = 0; panel < Panels; panel++) {
                const unsigned from =
                    b.address + (first_panel + panel) * b.panel_bytes + 16 * k * panel_row_bytes;
                wgmma<F, true>(x[panel], a[k], matrix_descriptor(from, 1024, 1024, Swizzle::b128));
            }
        return;
    }
#endif
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int panel = 0; panel < Panels; panel++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                unsigned fb[4];
                load_matrices_transposed(
                    fb, b.chunk(16 * k + lane % 16, 8 * (first_panel + panel) + 2 * j + lane / 16));
                mma<F>(reinterpret_cast<float (&)[4]>(x[panel][8 * j]), a[k], {fb[0], fb[1]});
                mma<F>(reinterpret_cast<float (&)[4]>(x[panel][8 * j + 4]), a[k], {fb[2], fb[3]});
            }
}

// Around groups of products; nothing for mma.sync, which is not asynchronous.
template <bool Wgmma>
inline void begin_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Wgmma) wgmma_fence();
#endif
}

template <bool Wgmma>
inline void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Wgmma) wgmma_commit();
#endif
}

// Waits until at most Pending groups are under way; x is what they wrote.
template <bool Wgmma, int Pending>
inline void wait_products(float (&x)[32]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Wgmma) {
        wgmma_wait<Pending>();
        wgmma_hold(x);
    }
#endif
}

// After the wait for a tile's copies, before the barrier.
template <bool Wgmma>
inline void publish_tiles() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Wgmma) fence_shared_for_wgmma();
#endif
}
