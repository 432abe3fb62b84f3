// What each query row brings to backward: δ = rowsum(dO∘O), and L (or m) as the exponent takes it off.
//
// Compiled with DO and O, the types of dO and O.

#include "attention_backward.cuh"

// Eight lanes a row: lane t sums elements 8t … 8t + 7 of each 64, then t + 4, t + 2, t + 1 join. At head dims from
// 65 to 96 four of them sum those of each 32.
template <class T>
inline void load8(float (&x)[8], const T* from, int count, bool aligned) {
    if (aligned && count >= 8) {
        struct alignas(16) Eight {
            T at[16 / sizeof(T)];
        };
#pragma unroll
        for (int i = 0; i < 8; i += 16 / sizeof(T)) {
            const Eight e = *reinterpret_cast<const Eight*>(from + i);
#pragma unroll
            for (int j = 0; j < 16 / sizeof(T); j++) x[i + j] = value(e.at[j]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = i < count ? value(from[i]) : 0.f;
    }
}

inline bool aligned16(const void* p, long long row_bytes) {
    return (reinterpret_cast<unsigned long long>(p) | row_bytes) % 16 == 0;
}

// lse, m, l: (batch · heads, tq) fp32. Rows past tq become empty ones.
extern "C" __global__ void __launch_bounds__(256) attention_delta(Array<const void> dout, Array<const void> o,
                                                                  const float* lse, const float* m,
                                                                  const float* l, const Args args) {
    const int blocks = int(args.padded_rows / 32), lane = threadIdx.x % 8;
    const Place place(args, blockIdx.x / blocks);
    const int row = blockIdx.x % blocks * 32 + threadIdx.x / 8;

    float delta = 0.f;
    if (delta_from != DeltaFrom::p_dp && row < args.tq) {
        const At at = place.at(args);
        const DO* dout_row = place.rows_of<DO>(dout, false) + row * dout.row;
        const O* o_row = place.rows_of<O>(o, false) + row * o.row;
        const bool dout_aligned = aligned16(dout_row, dout.row * sizeof(DO)),
                   o_aligned = aligned16(o_row, o.row * sizeof(O));
        const int width = args.d > 64 && args.d <= 96 ? 32 : 64;
        for (int col = 8 * lane; col < args.d && 8 * lane < width; col += width) {
            float a[8], b[8];
            load8(a, dout_row + col, args.d - col, dout_aligned);
            load8(b, o_row + col, args.d - col, o_aligned);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (col + i < args.d) {
                    const At here = at(row, col + i);
                    delta += rnd<attn_delta_prod>(rnd<attn_do>(a[i], here) * b[i], here);
                }
        }
    }
#pragma unroll
    for (int distance = 4; distance; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
    if (lane) return;

    delta = row < args.tq ? rnd<attn_delta>(delta, place.at(args)(row)) : 0.f;
    const long long padded = place.pair * args.padded_rows + row,
                    at_row = (long long)place.pair * args.tq + row;
    if (row >= args.tq || lse[at_row] == -__int_as_float(0x7F800000)) {
        args.rows[padded] = {__uint_as_float(empty_base), 0.f};
        if (p_bwd_from_m_l) args.inv_l[padded] = 0.f;
        return;
    }
    float base;
    if constexpr (p_bwd_from_m_l) {
        base = m[at_row] == -__int_as_float(0x7F800000) ? 0.f : m[at_row];
        if (order_fa2) base *= args.c;
        args.inv_l[padded] = 1.f / l[at_row];
    } else {
        base = order_fa2 ? lse[at_row] * functions::LOG2E : lse[at_row];
    }
    if (base != base) base = __int_as_float(0x7FFFFFFF);  // never the mark of an empty row
    args.rows[padded] = {base, delta};
}
