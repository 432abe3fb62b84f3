// Backward of attention for operands of any format, each product by itself: tensor core of its own operand
// type, or `sequential` on the CUDA cores. Clear rather than fast: P and dS of `count` heads and some rows
// lie in memory as fp32.
//
//     scores   P, dS of every element          (attention_any_scores)
//     dV += PᵀdO, dK += dSᵀQ                   (attention_any_dkdv)
//     dQ += dS·K                               (attention_any_dq)
//     δ = rowsum(P∘dP), before the others      (attention_any_delta, under delta_from = p_dp)
//
// Compiled with OPERAND, the type in which q, k, v, dO lie, and DQ, DK, DV, those of the results. A block of
// four warps makes 64 × 64 of a product, a warp 16 rows of it, in mma.cuh's fragments.

#include "attention_backward.cuh"

constexpr int kSide = 64, kDepth = 16;
using Fragments = float[8][4];
using Staged = float[kSide][kDepth + 4];  // rows of 16-byte chunks, eight rows of one column in different banks

inline float4 four(const float* x) { return *reinterpret_cast<const float4*>(x); }

// c += A · Bᵀ of this warp's rows over one stage of k.
template <class Product>
inline void multiply(Fragments& c, const Staged& a, const Staged& b) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = threadIdx.x / 32 * 16 + g;
    if constexpr (Product::sequential) {
#pragma unroll 1
        for (int k = 0; k < kDepth; k += 4) {
            const float4 a0 = four(a[row] + k), a1 = four(a[row + 8] + k);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 x = four(b[8 * j + 2 * t + e] + k);
                    fma4(c[j][e], a0, x);
                    fma4(c[j][2 + e], a1, x);
                }
        }
    } else if constexpr (Product::half) {
#pragma unroll
        for (int k = 0; k < kDepth; k += 16) {
            unsigned fa[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* x = &a[row + i % 2 * 8][k + 2 * t + i / 2 * 8];
                fa[i] = pack<Product::operand>(x[0], x[1]);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float* x = &b[8 * j + g][k + 2 * t];
                const unsigned fb[2] = {pack<Product::operand>(x[0], x[1]),
                                        pack<Product::operand>(x[8], x[9])};
                mma<Product::operand>(c[j], fa, fb);
            }
        }
    } else {
#pragma unroll
        for (int k = 0; k < kDepth; k += 8) {
            unsigned fa[4];
#pragma unroll
            for (int i = 0; i < 4; i++) fa[i] = __float_as_uint(a[row + i % 2 * 8][k + t + i / 2 * 4]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float* x = &b[8 * j + g][k + t];
                const unsigned fb[2] = {__float_as_uint(x[0]), __float_as_uint(x[4])};
                mma<Operand::tf32>(c[j], fa, fb);
            }
        }
    }
}

// What lies next to an element of a matrix: that of the next k, or that of the next line.
enum class Along { k, lines };

// A matrix in memory from its first line on; stride: to the next line, or to the next k.
template <class T, Along along>
struct Matrix {
    const T* x;
    long long stride;
    int lines;  // beyond them it is zero
};

// A thread's part of a stage. Neighbouring threads have neighbours; with those of lines, 8 of them at 4 k, which lie in
// 32 different banks.
template <class T, Along along>
struct Part {
    static constexpr int together = along == Along::k ? 128 / kDepth : 8;  // lines
    static constexpr int size = kSide * kDepth / 128;
    Matrix<T, along> m;
    float x[size];

    static int line(int n) { return together * n + (along == Along::k ? threadIdx.x / kDepth : threadIdx.x % together); }
    static int k() { return along == Along::k ? threadIdx.x % kDepth : threadIdx.x / together; }

    // Zero from `depth` on.
    void fetch(int k0, int depth) {
        const T* from = along == Along::k ? m.x + line(0) * m.stride + k0 + k() : m.x + (k0 + k()) * m.stride + line(0);
#pragma unroll
        for (int n = 0; n < size; n++)
            x[n] = k0 + k() < depth && line(n) < m.lines ? value(from[along == Along::k ? together * n * m.stride
                                                                                        : together * n])
                                                         : 0.f;
    }

    void put(Staged& to) const {
#pragma unroll
        for (int n = 0; n < size; n++) to[line(n)][k()] = x[n];
    }
};

// c += A · B over k in [0, depth), by all four warps. A stage is multiplied while the next comes from memory.
template <class Product, class A, Along along_a, class B, Along along_b>
inline void product(Fragments& c, int depth, bool wanted, Matrix<A, along_a> a, Matrix<B, along_b> b) {
    __shared__ __align__(16) Staged sa, sb;
    Part<A, along_a> next_a{a};
    Part<B, along_b> next_b{b};
    next_a.fetch(0, depth), next_b.fetch(0, depth);
    for (int k0 = 0; k0 < depth; k0 += kDepth) {
        __syncthreads();
        next_a.put(sa), next_b.put(sb);
        __syncthreads();
        next_a.fetch(k0 + kDepth, depth), next_b.fetch(k0 + kDepth, depth);
        if (wanted) multiply<Product>(c, sa, sb);
    }
    if (wanted)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[j][e] += 0.f;  // a zero of any product is +0
}

inline void clear(Fragments& c) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[j][e] = 0.f;
}

// Calls f(row, column, element) for this thread's elements of a 64 × 64 block.
template <class F>
inline void each(Fragments& c, F f) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = threadIdx.x / 32 * 16 + g;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(row + e / 2 * 8, 8 * j + 2 * t + e % 2, c[j][e]);
}

inline int blocks(int length) { return (length + kSide - 1) / kSide; }

// S and dP of rows from q0 and keys from k0, as the dot products give them.
inline void dot_products(Fragments& s, Fragments& dp, const Args& args, const Place& place, int q0, int k0) {
    const OPERAND* q = place.rows_of<OPERAND>(args.q, false);
    const OPERAND* k = place.rows_of<OPERAND>(args.k, !args.k_per_head);
    const OPERAND* v = place.rows_of<OPERAND>(args.v, !args.v_per_head);
    const OPERAND* dout = place.rows_of<OPERAND>(args.dout, false);
    const auto rows_of = [](const OPERAND* x, long long stride, int first, int end) {
        return Matrix<OPERAND, Along::k>{x + first * stride, stride, end - first};
    };
    clear(s), clear(dp);
    product<product_s>(s, args.d, true, rows_of(q, args.q.row, q0, args.tq),
                       rows_of(k, args.k.row, k0, args.tk));
    product<product_dp>(dp, args.d, true, rows_of(dout, args.dout.row, q0, args.tq),
                        rows_of(v, args.v.row, k0, args.tk));
}

// Where an element's row data lie, and whether it is neither masked nor in an empty row.
struct Element {
    Row row;
    float inv_l;
    bool shown;

    Element(const Args& args, const Place& place, int q, int key)
        : row{}, inv_l(0), shown(q < args.tq && args.shape().visible(q, key)) {
        if (!shown) return;
        const long long at = place.pair * args.padded_rows + q;
        row = args.rows[at];
        if (p_bwd_from_m_l) inv_l = args.inv_l[at];
        shown = !is_empty(row.base);
    }
};

extern "C" __global__ void __launch_bounds__(128) attention_any_scores(const Args args) {
    const int across = blocks(args.tk), down = blocks(args.row1 - args.row0);
    const Place place(args, blockIdx.x / (across * down));
    const int block = blockIdx.x % (across * down);
    const int q0 = args.row0 + block / across * kSide, k0 = block % across * kSide;
    const At at = place.at(args);
    Fragments s, dp;
    const bool hidden = args.shape().last_key(min(q0 + kSide, args.row1) - 1) < k0;
    if (!hidden) dot_products(s, dp, args, place, q0, k0);
    const long long rows = args.row1 - args.row0;
    float* p_out = static_cast<float*>(args.p) + place.slot * rows * args.tk;
    float* ds_out = static_cast<float*>(args.ds) + place.slot * rows * args.tk;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int q = q0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
            const int key = k0 + 8 * j + 2 * (threadIdx.x % 4) + i % 2;
            if (q >= args.row1 || key >= args.tk) continue;
            const Element e(args, place, q, key);
            const At here = at(q, key);
            const long long to = (q - args.row0) * (long long)args.tk + key;
            p_out[to] = ds_out[to] = 0.f;
            if (hidden || !e.shown) continue;
            const float p = probability(s[j][i], e.row.base, e.inv_l, args, here);
            p_out[to] = rnd<attn_p_bwd>(p, here);
            ds_out[to] = rnd<attn_ds>(score_gradient(p, dp[j][i], e.row.delta, args, here), here);
        }
}

// A running gradient: in memory, (batch · heads, T, D) fp32, so that launches over other rows go on from it.
extern "C" __global__ void __launch_bounds__(128) attention_any_dkdv(const Args args) {
    const int panels = blocks(args.d), across = blocks(args.tk) * panels;
    const Place place(args, blockIdx.x / across);
    const int k0 = blockIdx.x % across / panels * kSide, d0 = blockIdx.x % panels * kSide;
    const int warp_key = k0 + threadIdx.x / 32 * 16;
    const Shape shape = args.shape();
    const int br = tile_length(tile_dkdv_br, args.tq), bc = tile_length(tile_dkdv_bc, args.tk);
    const int block_first = shape.first_row(k0 / bc * bc, br),
              warp_first = shape.first_row(warp_key / bc * bc, br);
    const long long rows = args.row1 - args.row0;
    const float* p = static_cast<const float*>(args.p) + place.slot * rows * args.tk;
    const float* ds = static_cast<const float*>(args.ds) + place.slot * rows * args.tk;
    const OPERAND* q = place.rows_of<OPERAND>(args.q, false);
    const OPERAND* dout = place.rows_of<OPERAND>(args.dout, false);
    At at = place.at(args);
    const long long head = (long long)place.pair * args.tk * args.d;

    Fragments dv, dk;
    const auto inside = [&](int line, int col) { return k0 + line < args.tk && d0 + col < args.d; };
    const auto running = [&](float* from, Fragments& c) {
        each(c, [&](int line, int col, float& x) {
            x = args.begins || !inside(line, col) ? 0.f
                                                  : from[head + (k0 + line) * (long long)args.d + d0 + col];
        });
    };
    running(args.dv_head, dv);
    running(args.dk_head, dk);

    const int lowest = max(block_first, args.row0) / br * br,
              tiles = args.row1 > lowest ? (args.row1 - lowest + br - 1) / br : 0;
    for (int i = 0; i < tiles; i++) {
        const int q0 = lowest + (order_fa2 ? tiles - 1 - i : i) * br, q1 = min(q0 + br, args.row1);
        const bool wanted = q0 >= warp_first;
        at.tile = q0 / br;
        const auto key_rows = [&](const float* x) {
            return Matrix<float, Along::lines>{x + (q0 - args.row0) * (long long)args.tk + k0, args.tk, args.tk - k0};
        };
        const auto columns = [&](const OPERAND* x, long long stride) {
            return Matrix<OPERAND, Along::lines>{x + q0 * stride + d0, stride, args.d - d0};
        };
        if constexpr (order_fa2) {
            product<product_dv>(dv, q1 - q0, wanted, key_rows(p), columns(dout, args.dout.row));
            product<product_dk>(dk, q1 - q0, wanted, key_rows(ds), columns(q, args.q.row));
            if (wanted) {
                each(dv,
                     [&](int line, int col, float& x) { x = rnd<attn_dv_acc>(x, at(k0 + line, d0 + col)); });
                each(dk,
                     [&](int line, int col, float& x) { x = rnd<attn_dk_acc>(x, at(k0 + line, d0 + col)); });
            }
        } else {
            Fragments tile;
            const auto add = [&](Fragments& sum, auto tile_site, auto acc_site) {
                if (!wanted) return;
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const At here = at(warp_key + threadIdx.x % 32 / 4 + e / 2 * 8,
                                           d0 + 8 * j + 2 * (threadIdx.x % 4) + e % 2);
                        const float x = rnd<decltype(tile_site)>(tile[j][e], here);
                        sum[j][e] = rnd<decltype(acc_site)>(sum[j][e] + x, here);
                    }
            };
            clear(tile);
            product<product_dv>(tile, q1 - q0, wanted, key_rows(p), columns(dout, args.dout.row));
            add(dv, attn_dv_tile{}, attn_dv_acc{});
            clear(tile);
            product<product_dk>(tile, q1 - q0, wanted, key_rows(ds), columns(q, args.q.row));
            add(dk, attn_dk_tile{}, attn_dk_acc{});
        }
    }

    at.tile = 0;
    const auto finish = [&](Fragments& c, float* to, auto result, auto head_site, auto site,
                            const Array<void>& out, bool scaled) {
        each(c, [&](int line, int col, float& x) {
            if (!inside(line, col)) return;
            const At here = at(k0 + line, d0 + col);
            if (args.ends) x = finished<decltype(head_site)>(x, scaled, args, here);
            if (args.ends && args.group == 1) {
                auto* row = static_cast<decltype(result)*>(out.data) + place.sample * out.batch +
                            place.head * out.head;
                store(row + (k0 + line) * out.row + d0 + col, rnd<decltype(site)>(x, here));
            } else {
                to[head + (k0 + line) * (long long)args.d + d0 + col] = x;
            }
        });
    };
    finish(dv, args.dv_head, DV{}, attn_dv_head{}, attn_dv{}, args.dv, false);
    finish(dk, args.dk_head, DK{}, attn_dk_head{}, attn_dk{}, args.dk, true);
}

extern "C" __global__ void __launch_bounds__(128) attention_any_dq(const Args args) {
    const int panels = blocks(args.d), across = blocks(args.row1 - args.row0) * panels;
    const Place place(args, blockIdx.x / across);
    const int r0 = args.row0 + blockIdx.x % across / panels * kSide, d0 = blockIdx.x % panels * kSide;
    const Shape shape = args.shape();
    const int bc = tile_length(tile_dq_bc, args.tk);
    // Rows of a warp lie in one query tile, those of the block maybe not.
    const auto end_of = [&](int row) {
        return row < args.row1 ? shape.key_end(shape.query_tile_end(row, tile_dq_br), tile_dq_bc) : 0;
    };
    const int warp_end = end_of(r0 + threadIdx.x / 32 * 16),
              end = max(end_of(r0), end_of(min(r0 + kSide, args.row1) - 1));
    const long long rows = args.row1 - args.row0;
    const float* ds = static_cast<const float*>(args.ds) + (place.slot * rows + r0 - args.row0) * args.tk;
    const OPERAND* k = place.rows_of<OPERAND>(args.k, !args.k_per_head);
    At at = place.at(args);

    Fragments dq, tile;
    clear(dq);
    const int tiles = (end + bc - 1) / bc;
    for (int i = 0; i < tiles; i++) {
        const int j = order_fa2 ? tiles - 1 - i : i, k0 = j * bc, k1 = min(k0 + bc, args.tk);
        const bool wanted = k0 < warp_end;
        clear(tile);
        product<product_dq>(tile, k1 - k0, wanted, Matrix<float, Along::k>{ds + k0, args.tk, args.row1 - r0},
                            Matrix<OPERAND, Along::lines>{k + k0 * args.k.row + d0, args.k.row, args.d - d0});
        at.tile = j;
        if (wanted)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const At here = at(r0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + e / 2 * 8,
                                       d0 + 8 * n + 2 * (threadIdx.x % 4) + e % 2);
                    dq[n][e] = rnd<attn_dq_acc>(dq[n][e] + rnd<attn_dq_tile>(tile[n][e], here), here);
                }
    }
    at.tile = 0;
    DQ* out = static_cast<DQ*>(args.dq.data) + place.sample * args.dq.batch + place.head * args.dq.head;
    each(dq, [&](int line, int col, float& x) {
        if (r0 + line < args.row1 && d0 + col < args.d)
            store(out + (r0 + line) * args.dq.row + d0 + col,
                  finished<attn_dq>(x, true, args, at(r0 + line, d0 + col)));
    });
}

// δ = rowsum(P∘dP): the four sums of numerics section 7, carried over dQ's key tiles.
extern "C" __global__ void __launch_bounds__(128) attention_any_delta(const Args args) {
    const int down = blocks(args.tq);
    const Place place(args, blockIdx.x / down);
    const int q0 = blockIdx.x % down * kSide;
    const Shape shape = args.shape();
    const int bc = tile_length(tile_dq_bc, args.tk);
    const int first_row = q0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const auto end_of = [&](int row) {
        return shape.key_end(shape.query_tile_end(row, tile_dq_br), tile_dq_bc);
    };
    const int end = max(end_of(q0), end_of(min(q0 + kSide, args.tq) - 1)), tiles = (end + bc - 1) / bc;
    const At at = place.at(args);
    float sums[2] = {0.f, 0.f};
    for (int i = 0; i < tiles; i++) {
        const int k0 = (order_fa2 ? tiles - 1 - i : i) * bc, k1 = min(k0 + bc, args.tk);
        for (int key0 = k0; key0 < k1; key0 += kSide) {
            Fragments s, dp;
            dot_products(s, dp, args, place, q0, key0);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int q = first_row + e / 2 * 8, key = key0 + 8 * j + 2 * (threadIdx.x % 4) + e % 2;
                    const Element element(args, place, q, key);
                    if (!element.shown || key >= k1)
                        continue;  // adding 0 would change nothing: the sums start from +0
                    const At here = at(q, key);
                    const float p = rnd<attn_p_ds>(
                        probability(s[j][e], element.row.base, element.inv_l, args, here), here);
                    sums[e / 2] += rnd<attn_delta_prod>(p * rnd<attn_dp>(dp[j][e], here), here);
                }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sums[i] += __shfl_xor_sync(~0u, sums[i], 2);
        sums[i] += __shfl_xor_sync(~0u, sums[i], 1);
        const int q = first_row + 8 * i;
        if (q < args.tq && threadIdx.x % 4 == 0)
            args.rows[place.pair * args.padded_rows + q].delta = rnd<attn_delta>(sums[i], at(q));
    }
}
